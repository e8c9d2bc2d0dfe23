// Modelled times of calls beyond one node or one collective: gathers and scatters over hosts, and a
// Linear that does both.
#pragma once

#include "model/times_designs.h"
#include "model/times_node.h"
#include "model/times_work.h"

namespace axonn::times {

// Each rank is on a separate host. A gather uses NcclChunks (nccl/nccl_chunks.h), which issues one
// group of sends and receives per chunk, or with (f) per shard.
double hosts_gather_us(const Work& work, const Design& design, const Rates& rates = kH100);
// cuBLAS, then NCCL; or with (i) each chunk is sent as soon as the GEMM finishes it.
double hosts_scatter_us(const Work& work, const Design& design, const Rates& rates = kH100);

// NCCL's collectives over hosts, with cuBLAS before or after.
double hosts_library_us(const Work& work, int64_t bytes, const Rates& rates = kH100);

// A product whose rows are gathered over `gathers` ranks and whose result is scattered over the
// other ranks of a node. `work.ranks` is the number of ranks of the scatter.
struct Both {
  Work work;
  int32_t gathers;
};
std::vector<Both> linears();
double library_both_us(const Both& both, const Rates& rates = kH100);
// NCCL's gather, then the fused product and scatter; or with (h) one kernel does it all.
double fused_both_us(const Both& both, const Design& design);

}  // namespace axonn::times
