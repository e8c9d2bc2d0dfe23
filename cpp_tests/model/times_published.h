// Times that others have published, and the model's predictions of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/times_work.h"

namespace axonn::times {

enum class Timed {
  kProduct,         // by cuBLAS
  kTiles,           // by a kernel with given tiles
  kGather,          // by NCCL, of m x n elements; a reduce-scatter takes as long
  kSum,             // by NCCL, also of m x n elements
  kLibraryGather,   // NCCL's all-gather, then cuBLAS
  kLibraryScatter,  // cuBLAS, then NCCL's reduce-scatter
  kFluxGather,      // Flux, whose GEMM waits for copies as ours does
  kFluxScatter,     // Flux, whose epilogue stores at the peers as ours does
};

struct Tiles {
  int64_t block_m = 0;
  int64_t block_n = 0;
  int64_t cluster_m = 1;
  int64_t num_ctas = 0;
};

struct Published {
  Timed timed;
  Work work;
  double us;
  const char* source;
  Tiles tiles{};
};

const char* name_of(Timed timed);
const std::vector<Published>& published();
double modelled_us(const Published& entry);
// Returns modelled over published time, minus one.
double error_of(const Published& entry);

}  // namespace axonn::times
