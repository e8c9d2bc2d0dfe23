#include <cuda_bf16.h>

#include "core/cuda/fused/flags.cuh"
#include "gpu_machine/runtime/slow_gemm.h"

namespace axonn::gpu_machine {
namespace {

using kernels::DataType;
using kernels::LaunchConfig;
using kernels::cuda::Arriving;
using kernels::cuda::FusedGemm;
using kernels::cuda::SumToAll;

constexpr int kThreads = 32;

__device__ float element(const void* matrix, int64_t row, int64_t column, int64_t stride,
                         bool transposed) {
  const int64_t at = transposed ? column * stride + row : row * stride + column;
  return __bfloat162float(static_cast<const __nv_bfloat16*>(matrix)[at]);
}

// Waits until a chunk has arrived.
__device__ void await_chunk(const FusedGemm& gemm, int64_t ordinal) {
  const auto& arrivals = gemm.arrivals;
  const auto layout = comm::SignalLayout::of(arrivals.plan, 1);
  const int64_t flag = layout.flag(0, arrivals.plan.from_ordinal(ordinal));
  kernels::cuda::await_rows(
      kernels::cuda::flag_at(arrivals.pad, flag), *arrivals.epoch, arrivals.limit,
      {static_cast<int32_t>(arrivals.plan.chunks_per_shard), static_cast<int32_t>(ordinal)});
}

// Each CTA has one warp and computes the rows of one chunk.
__global__ void __launch_bounds__(kThreads)
    slow_gemm_kernel(const __grid_constant__ FusedGemm gemm, comm::ChunkPlan rows) {
  const auto ordinal = static_cast<int64_t>(blockIdx.x);
  const auto& arrivals = gemm.arrivals;
  if (arrivals.dim == Arriving::kRows) {
    await_chunk(gemm, ordinal);
  } else if (arrivals.dim != Arriving::kNothing) {
    for (int64_t i = 0; i < arrivals.plan.num_chunks(); ++i) await_chunk(gemm, i);
  }
  const comm::ChunkIndex index = rows.from_ordinal(ordinal);
  const comm::Range range = rows.chunk(index);
  const bool departs = gemm.departures.num_ranks > 0;
  auto* d = static_cast<__nv_bfloat16*>(departs ? gemm.departures.slots[index.shard] : gemm.d);
  const int64_t first = departs ? rows.shard(index.shard).begin : 0;
  for (int64_t i = static_cast<int64_t>(threadIdx.x); i < range.size() * gemm.n; i += kThreads) {
    const int64_t row = range.begin + i / gemm.n, column = i % gemm.n;
    float sum = 0;
    for (int64_t k = 0; k < gemm.k; ++k) {
      sum += element(gemm.a, row, k, gemm.lda, gemm.a_transposed) *
             element(gemm.b, k, column, gemm.ldb, gemm.b_transposed);
    }
    d[(row - first) * gemm.ldd + column] = __float2bfloat16(sum);
  }
  __syncwarp();
  if (departs && threadIdx.x == 0) {
    const comm::SignalLayout layout{1, rows.num_shards, rows.chunks_per_shard};
    const int64_t flag = layout.flag(0, {gemm.departures.rank, index.chunk});
    kernels::cuda::store_release(kernels::cuda::flag_at(gemm.departures.pads[index.shard], flag),
                                 *gemm.departures.epoch);
  }
}

const char* why_unsupported(const FusedGemm& gemm) {
  return gemm.dtype == DataType::kBFloat16 && gemm.bias == nullptr && gemm.residual == nullptr
             ? nullptr
             : "only bfloat16 without bias and residual";
}

cudaError_t launch(const FusedGemm& gemm, const LaunchConfig&, cudaStream_t stream) {
  comm::ChunkPlan rows{gemm.m, 1, 1};
  if (gemm.arrivals.dim == Arriving::kRows) rows = gemm.arrivals.plan;
  if (gemm.departures.num_ranks > 0) {
    rows = {gemm.m, gemm.departures.num_ranks, gemm.departures.chunks_per_shard};
  }
  slow_gemm_kernel<<<static_cast<unsigned>(rows.num_chunks()), kThreads, 0, stream>>>(gemm, rows);
  return cudaGetLastError();
}

cudaError_t sum_to_all(const SumToAll&, cudaStream_t) { return cudaErrorNotSupported; }

cudaError_t load() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, slow_gemm_kernel);
}

}  // namespace

kernels::cuda::GemmBackend slow_backend() {
  return {&why_unsupported, &launch, &sum_to_all, nullptr, &load};
}

}  // namespace axonn::gpu_machine
