// Modelled times of the fused calls, as fused_calls.cpp enqueues them or as another design would.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "model/times_designs.h"
#include "model/times_gemm.h"
#include "model/times_node.h"
#include "model/times_work.h"

namespace axonn::times {

struct CallTimes {
  double device_us = 0;   // from the end of the previous call to the end of this one
  double host_us = 0;     // to enqueue it
  double gemm_us = 0;     // from the first tile to the last
  double flops = 0;       // of the product
  double sent_bytes = 0;  // sent (and received) over NVLink; for multicast, the bytes received
  kernels::LaunchConfig config{};

  // The time between calls that follow each other closely.
  double us() const { return std::max(device_us, host_us); }
};

// Each uses the fastest of the design's tile choices.
CallTimes all_gather_gemm(const Work& work, const Design& design, Host host = Host::kAhead);
CallTimes gemm_reduce_scatter(const Work& work, const Design& design, Host host = Host::kAhead);
CallTimes gemm_all_reduce(const Work& work, const Design& design, Host host = Host::kAhead);

// (h): one kernel gathers rows over `gathers` ranks, multiplies, and scatters the product.
CallTimes gather_gemm_scatter(const Work& work, int32_t gathers, const Design& design);

// The same with given tiles.
CallTimes all_gather_gemm(const Work& work, const Design& design, const kernels::LaunchConfig& tile,
                          Host host);

// Returns when the sums of all chunks are done if they start as the chunks arrive, on SMs that have
// no more tiles. Each takes `chunk_us` if enough SMs are free.
double sums_end_us(const std::vector<double>& arrived_us, std::vector<double> free_us,
                   double chunk_us, const Rates& rates);

}  // namespace axonn::times
