#include "ops/cuda/triton_gemm.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <string>
#include <vector>

namespace axonn::ops::cuda {
namespace {

using kernels::LaunchConfig;
using kernels::cuda::Arrivals;
using kernels::cuda::Arriving;
using kernels::cuda::Departures;
using kernels::cuda::FusedGemm;
using kernels::cuda::GemmBackend;

// Kernels hold sizes, and the tile edges that lie beyond them, in 32 bits.
constexpr int64_t kMaxSize = (int64_t{1} << 31) - 1024;

using Gather = void(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::string&,
                    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t);
using Scatter = void(const at::Tensor&, const at::Tensor&, int64_t, int64_t, at::IntArrayRef,
                     at::IntArrayRef, int64_t, int64_t, int64_t);

// typed() checks this signature against the schema.
const auto& gather_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("axonn::_fused_gather_triton", "")
                             .typed<Gather>();
  return op;
}

const auto& scatter_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("axonn::_fused_scatter_triton", "")
                             .typed<Scatter>();
  return op;
}

int64_t address(const void* pointer) { return reinterpret_cast<int64_t>(pointer); }

// Returns a view of memory on the current device. The memory must outlive the launch.
at::Tensor matrix(const void* data, int64_t rows, int64_t columns, bool transposed, int64_t leading,
                  kernels::DataType dtype) {
  const c10::Device device(c10::kCUDA, c10::cuda::current_device());
  const auto type = dtype == kernels::DataType::kFloat16 ? at::kHalf : at::kBFloat16;
  const std::vector<int64_t> strides =
      transposed ? std::vector<int64_t>{1, leading} : std::vector<int64_t>{leading, 1};
  return at::for_blob(const_cast<void*>(data), {rows, columns})
      .strides(strides)
      .options(at::TensorOptions().dtype(type).device(device))
      .target_device(device)
      .make_tensor();
}

std::string name_of(const FusedGemm& gemm) {
  switch (gemm.arrivals.dim) {
    case Arriving::kRows:
      return "rows";
    case Arriving::kColumns:
      return "columns";
    default:  // of either operand
      return "inner";
  }
}

const char* why_unsupported(const FusedGemm& gemm) {
  if (gemm.bias != nullptr || gemm.residual != nullptr) return "bias and residual are not added";
  if (gemm.m < 1 || gemm.n < 1 || gemm.k < 1) return "sizes must be positive";
  if (gemm.m > kMaxSize || gemm.n > kMaxSize || gemm.k > kMaxSize) {
    return "sizes must be at most 2^31 - 1024";
  }
  if (gemm.departures.num_ranks > 0 && gemm.m % gemm.departures.num_ranks != 0) {
    return "ranks must share the rows evenly";
  }
  if (gemm.arrivals.dim == Arriving::kNothing) return nullptr;
  if (gemm.departures.num_ranks > 0) return "what arrives cannot leave";
  const auto& plan = gemm.arrivals.plan;
  const bool even = plan.legal() && plan.count % plan.num_shards == 0;
  return even ? nullptr : "ranks must share evenly what is gathered";
}

cudaError_t launch(const FusedGemm& gemm, const LaunchConfig& config, cudaStream_t stream) {
  const auto device = c10::cuda::current_device();
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(stream, device));
  const auto a = matrix(gemm.a, gemm.m, gemm.k, gemm.a_transposed, gemm.lda, gemm.dtype);
  const auto b = matrix(gemm.b, gemm.k, gemm.n, gemm.b_transposed, gemm.ldb, gemm.dtype);
  if (gemm.departures.num_ranks > 0) {
    const Departures& to = gemm.departures;
    std::vector<int64_t> slots, pads;
    for (int32_t rank = 0; rank < to.num_ranks; ++rank) {
      slots.push_back(address(to.slots[rank]));
      pads.push_back(address(to.pads[rank]));
    }
    scatter_op().call(a, b, to.rank, to.chunks_per_shard, slots, pads, address(to.counters),
                      address(to.epoch), config.num_ctas);
  } else {
    const Arrivals& from = gemm.arrivals;
    const auto d = matrix(gemm.d, gemm.m, gemm.n, /*transposed=*/false, gemm.ldd, gemm.dtype);
    gather_op().call(a, b, d, name_of(gemm), from.rank, from.plan.num_shards,
                     from.plan.chunks_per_shard, from.plan.tile, address(from.pad),
                     address(from.epoch), address(from.limit.failure),
                     static_cast<int64_t>(from.limit.budget_ns), config.num_ctas);
  }
  return cudaSuccess;  // Python raises the errors that Triton's launcher reports
}

cudaError_t load() { return cudaSuccess; }  // a kernel is compiled when it is first launched

}  // namespace

bool has_triton_gemms() {
  return gather_op().hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
         scatter_op().hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

const GemmBackend& triton_gemms() {
  static constexpr GemmBackend kBackend{.why_unsupported = &why_unsupported,
                                        .launch = &launch,
                                        .sum_to_all = nullptr,
                                        .sum_in_switch = nullptr,
                                        .load = &load,
                                        .chooses_tiles = true};
  return kBackend;
}

}  // namespace axonn::ops::cuda
