#include "core/cuda/sm90/plans.h"

namespace axonn::kernels::sm90 {
namespace {

using cuda::Arrivals;
using cuda::Arriving;
using cuda::Departures;
using cuda::FusedGemm;
using cuda::kLoadBytes;

constexpr int64_t kMaxSize = int64_t{1} << 31;

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kLoadBytes == 0;
}

bool is_aligned(int64_t elements, DataType dtype) {
  return elements * size_of(dtype) % kLoadBytes == 0;
}

const char* why_unsupported_operands(const FusedGemm& gemm) {
  if (gemm.dtype != DataType::kBFloat16 && gemm.dtype != DataType::kFloat16) {
    return "the dtype must be bfloat16 or float16";
  }
  if (gemm.m < 1 || gemm.n < 1 || gemm.k < 1) return "sizes must be positive";
  if (gemm.m >= kMaxSize || gemm.n >= kMaxSize || gemm.k >= kMaxSize) {
    return "sizes must be below 2^31";
  }
  if (!is_aligned(gemm.a) || !is_aligned(gemm.b)) return "operands must be aligned to 16 bytes";
  for (const int64_t stride : {gemm.lda, gemm.ldb, gemm.ldd}) {
    if (!is_aligned(stride, gemm.dtype)) return "rows must be a multiple of 16 bytes apart";
  }
  for (const int64_t size :
       {gemm.a_transposed ? gemm.m : gemm.k, gemm.b_transposed ? gemm.k : gemm.n, gemm.n}) {
    if (!is_aligned(size, gemm.dtype)) return "rows must be a multiple of 16 bytes long";
  }
  return nullptr;
}

const char* why_unsupported_arrivals(const FusedGemm& gemm) {
  const Arrivals& arrivals = gemm.arrivals;
  if (arrivals.dim == Arriving::kNothing) return nullptr;
  if (!arrivals.plan.legal() || arrivals.plan.num_chunks() > cuda::kMaxChunks) {
    return "more chunks arrive than a warp has lanes";
  }
  const int64_t size = arrivals.dim == Arriving::kRows      ? gemm.m
                       : arrivals.dim == Arriving::kColumns ? gemm.n
                                                            : gemm.k;
  if (arrivals.plan.count != size) return "the plan of arrivals is of another size";
  if (arrivals.dim == Arriving::kRows && gemm.departures.num_ranks > 0) {
    return "rows cannot both arrive and leave";
  }
  return nullptr;
}

const char* why_unsupported_departures(const FusedGemm& gemm) {
  const Departures& departures = gemm.departures;
  if (departures.num_ranks == 0) {
    if (!is_aligned(gemm.d)) return "the result must be aligned to 16 bytes";
    if (!is_aligned(gemm.residual) || !is_aligned(gemm.bias)) {
      return "bias and residual must be aligned to 16 bytes";
    }
    return nullptr;
  }
  if (departures.num_ranks > cuda::kMaxPeers) return "at most 8 ranks can be sent to";
  if (departures.chunks_per_shard < 1 || departures.chunks_per_shard > comm::kMaxChunksPerShard) {
    return "a shard leaves in 1 to 4 chunks";
  }
  if (gemm.m % departures.num_ranks != 0) return "ranks must share the rows evenly";
  // Each batch of A begins at a destination's first row, which must be aligned.
  if (gemm.a_transposed && !is_aligned(gemm.m / departures.num_ranks, gemm.dtype)) {
    return "a destination's rows of a transposed A must be a multiple of 16 bytes";
  }
  if (gemm.bias != nullptr || gemm.residual != nullptr) {
    return "what leaves is a part of a sum: bias and residual are added to the sum";
  }
  for (int32_t rank = 0; rank < departures.num_ranks; ++rank) {
    if (!is_aligned(departures.slots[rank])) return "slots must be aligned to 16 bytes";
  }
  return nullptr;
}

}  // namespace

const char* why_unsupported(const FusedGemm& gemm) {
  if (const char* why = why_unsupported_operands(gemm)) return why;
  if (gemm.a_transposed && gemm.b_transposed) return "A and B cannot both be transposed";
  if (const char* why = why_unsupported_arrivals(gemm)) return why;
  return why_unsupported_departures(gemm);
}

}  // namespace axonn::kernels::sm90
