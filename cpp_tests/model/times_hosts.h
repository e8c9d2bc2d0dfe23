// Modelled times of what goes beyond one node, or beyond one collective: gathers and scatters over
// hosts, and a Linear that gathers and scatters.
#pragma once

#include "model/times_designs.h"
#include "model/times_node.h"
#include "model/times_work.h"

namespace axonn::times {

// Each rank is on a host of its own. A gather goes over NcclChunks (nccl/nccl_chunks.h), which
// takes a group of a send and a receive for each chunk, or with (f) for each shard.
double hosts_gather_us(const Work& work, const Design& design, const Rates& rates = kH100);
// cuBLAS and then NCCL; or with (i) chunks are sent as the GEMM finishes them.
double hosts_scatter_us(const Work& work, const Design& design, const Rates& rates = kH100);

// NCCL's collectives over hosts, with cuBLAS in front or behind.
double hosts_library_us(const Work& work, int64_t bytes, const Rates& rates = kH100);

// A product whose rows are gathered over `gathers` ranks and whose result is scattered over the
// other ranks of a node. `work.ranks` are those of the scatter.
struct Both {
  Work work;
  int32_t gathers;
};
std::vector<Both> linears();
double library_both_us(const Both& both, const Rates& rates = kH100);
// NCCL's gather in front of the fused product and scatter; or with (h) one kernel does it all.
double fused_both_us(const Both& both, const Design& design);

}  // namespace axonn::times
