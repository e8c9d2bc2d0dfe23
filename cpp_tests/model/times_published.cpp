#include "model/times_published.h"

#include "model/times_calls.h"
#include "model/times_choice.h"
#include "model/times_library.h"

namespace axonn::times {
namespace {

constexpr int64_t kMiB = 1 << 20;

// A Work whose gathered operand and whose result are tensors of `mib` MiB.
constexpr Work tensor(int64_t mib) { return {mib * kMiB / 2 / 1024, 1024, 1024, 8}; }

std::vector<Published> all_published() {
  const char* fast = "github.com/pranjalssh/fast.cu, README";
  const char* tile_ops = "tile-ai/TileOPs#2110, H200";
  const char* batched = "tile-ai/TileOPs#2148, H200, 8 products of 1024^3";
  const char* megatron = "NVIDIA/Megatron-LM#5596, ring";
  const char* scattered = "NVIDIA/Megatron-LM#5596, ring, reduce-scatter";
  const char* vllm = "vllm-project/vllm#42324, last table before that of B200";
  const char* flux = "bytedance/flux#90";
  std::vector<Published> result = {
      {Timed::kProduct, {8192, 8192, 8192}, 1378, fast},
      {Timed::kProduct, {6144, 6144, 6144}, 626, fast},
      {Timed::kProduct, {1024, 1024, 1024}, 6.2, tile_ops},
      {Timed::kProduct, {8192, 1024, 1024}, 31.0, batched},
      {Timed::kTiles, {8192, 8192, 8192}, 1376, fast, {128, 256, 2, 128}},
      {Timed::kTiles, {6144, 6144, 6144}, 599, fast, {128, 256, 2, 128}},
      {Timed::kTiles, {8192, 8192, 8192}, 1414, fast, {192, 192, 1, 128}},
      {Timed::kTiles, {6144, 6144, 6144}, 605, fast, {192, 192, 1, 128}},
      {Timed::kGather, tensor(2), 20.2, megatron},
      {Timed::kGather, tensor(2), 18.6, scattered},
      {Timed::kGather, tensor(8), 43.4, megatron},
      {Timed::kGather, tensor(8), 47.0, scattered},
      {Timed::kGather, tensor(32), 118.9, megatron},
      {Timed::kGather, tensor(32), 112.6, scattered},
      {Timed::kGather, tensor(128), 385.3, megatron},
      {Timed::kSum, tensor(4), 50, vllm},
      {Timed::kSum, tensor(8), 76, vllm},
      {Timed::kSum, tensor(16), 121, vllm},
      {Timed::kSum, tensor(32), 195, vllm},
      {Timed::kSum, tensor(64), 316, vllm},
      {Timed::kSum, tensor(128), 561, vllm},
  };
  // The report omits the features of the gather. 8192 in and 57344 / 8 out are inferred: only they
  // let the product take the time that the report leaves it, at the rate of its reduce-scatters.
  struct Row {
    int64_t m;
    double torch_gather, flux_gather, torch_scatter, flux_scatter;
  };
  constexpr Row kRuns[] = {
      {1024, 247.25, 250, 180, 183.25},           {2048, 454, 426.125, 289.5, 331},
      {4096, 867, 673, 542.25, 632.875},          {8192, 1692, 1315.25, 1040, 1241},
      {16384, 3386.75, 2803.63, 2010.63, 2458.5}, {32768, 6831.37, 5819, 3978, 4986.37}};
  for (const Row& row : kRuns) {
    const Work gather{row.m, 57344 / 8, 8192}, scatter{row.m, 8192, 28672 / 8};
    result.push_back({Timed::kLibraryGather, gather, row.torch_gather, flux});
    result.push_back({Timed::kFluxGather, gather, row.flux_gather, flux});
    result.push_back({Timed::kLibraryScatter, scatter, row.torch_scatter, flux});
    result.push_back({Timed::kFluxScatter, scatter, row.flux_scatter, flux});
  }
  return result;
}

double tiles_us(const Published& entry) {
  const Tiles& tiles = entry.tiles;
  const kernels::LaunchConfig tile{tiles.block_m, tiles.block_n, 64, 4, 8, 4, tiles.cluster_m, 1,
                                   tiles.num_ctas};
  return run_gemm(grid_of(entry.work, Flow::kStays, tile), 0, {}, {}, kH100).end_us;
}

}  // namespace

const char* name_of(Timed timed) {
  switch (timed) {
    case Timed::kProduct:
      return "cuBLAS";
    case Timed::kTiles:
      return "a kernel of given tiles";
    case Timed::kGather:
      return "NCCL all-gather or reduce-scatter";
    case Timed::kSum:
      return "NCCL all-reduce";
    case Timed::kLibraryGather:
      return "all-gather, then cuBLAS";
    case Timed::kLibraryScatter:
      return "cuBLAS, then reduce-scatter";
    case Timed::kFluxGather:
      return "Flux, all-gather";
    case Timed::kFluxScatter:
      return "Flux, reduce-scatter";
  }
  return "";
}

const std::vector<Published>& published() {
  static const std::vector<Published> entries = all_published();
  return entries;
}

double modelled_us(const Published& entry) {
  const Work& work = entry.work;
  switch (entry.timed) {
    case Timed::kProduct:
      return cublas_us(work);
    case Timed::kTiles:
      return tiles_us(entry);
    case Timed::kGather:
      return nccl_gather_us(work.result_bytes(), work.ranks);
    case Timed::kSum:
      return nccl_sum_us(work.result_bytes());
    case Timed::kLibraryGather:
      return library_gather_us(work);
    case Timed::kLibraryScatter:
      return library_scatter_us(work);
    case Timed::kFluxGather:
      // Its flags are written by cuStreamWriteValue32. It is assumed to use the tile that is best
      // for the product by itself.
      return all_gather_gemm(work, with("cm")).us();
    case Timed::kFluxScatter:
      return gemm_reduce_scatter(work, with("m")).us();
  }
  return 0;
}

double error_of(const Published& entry) { return modelled_us(entry) / entry.us - 1; }

}  // namespace axonn::times
