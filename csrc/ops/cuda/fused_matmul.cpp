#include "ops/cuda/fused_matmul.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAStream.h>

#include <stdexcept>

#include "core/cuda/check.h"
#include "ops/checks.h"
#include "ops/cuda/gemm_backend.h"

namespace axonn::ops::cuda {
namespace {

using kernels::LaunchConfig;
using kernels::Residency;
using kernels::cuda::Arriving;
using kernels::cuda::FusedGemm;
using kernels::cuda::GatheredRows;
using kernels::cuda::SumBroadcast;

kernels::DataType checked_dtype(const char* op, const at::Tensor& t) {
  const auto why = why_no_dtype(t.scalar_type());
  TORCH_CHECK_NOT_IMPLEMENTED(why.empty(), op, ": ", why);
  return gemm_dtype(t.scalar_type());
}

// Describes how a matrix lies in memory.
struct Stored {
  bool transposed;
  int64_t leading;  // elements between rows; between columns if transposed
};

Stored stored(const char* op, const char* name, const at::Tensor& t) {
  const auto by_rows = [](const at::Tensor& m) { return m.size(1) == 1 || m.stride(1) == 1; };
  const auto leading = [](const at::Tensor& m) { return m.size(0) == 1 ? m.size(1) : m.stride(0); };
  if (by_rows(t)) return {false, leading(t)};
  const auto columns = t.t();
  TORCH_CHECK_VALUE(by_rows(columns), op, ": ", name,
                    " must be contiguous by rows or by columns, got strides ", t.strides());
  return {true, leading(columns)};
}

void set_a(const char* op, FusedGemm& gemm, const at::Tensor& a) {
  const Stored layout = stored(op, "a", a);
  gemm.a = a.const_data_ptr();
  gemm.a_transposed = layout.transposed;
  gemm.lda = layout.leading;
}

void set_b(const char* op, FusedGemm& gemm, const at::Tensor& b) {
  const Stored layout = stored(op, "b", b);
  gemm.b = b.const_data_ptr();
  gemm.b_transposed = layout.transposed;
  gemm.ldb = layout.leading;
}

// Raises NotImplementedError for products that the kernels cannot compute; the other algorithms can
// compute them.
void require_supported(const char* op, const FusedGemm& gemm, c10::Device device) {
  const char* why = gemm_backend(op, device).why_unsupported(gemm);
  TORCH_CHECK_NOT_IMPLEMENTED(why == nullptr, op, ": the fused kernels cannot do this: ", why,
                              "; use 'auto', 'chunked' or 'sequential'");
}

// Turns the kernels' std::invalid_argument into NotImplementedError, because the other algorithms
// can compute the product.
template <typename Call>
void enqueue(const char* op, Call&& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": algorithm='fused' cannot do this: ", error.what(),
                                "; use 'auto', 'chunked' or 'sequential'");
  }
}

// Returns whether the switch adds up an all-reduce, provided that it can. Otherwise the GEMM has
// all SMs, and its tile must be chosen for them.
bool may_add_in_switch(const char* op, const FusedGemm& gemm, const AskedSumBroadcast& asked,
                       int32_t num_ranks, c10::Device device) {
  if (asked.way) return *asked.way == SumBroadcast::kSwitch;
  return kernels::cuda::may_add_in_switch(
      {.num_ranks = num_ranks,
       .slot_bytes = kernels::cuda::reduce_scatter_workspace_bytes(gemm, num_ranks) / num_ranks,
       .has_multicast = true,
       .has_kernel = gemm_backend(op, device).sum_to_all != nullptr,
       .any_order = asked.any_order});
}

}  // namespace

std::string why_no_dtype(at::ScalarType dtype) {
  if (dtype == at::kBFloat16 || dtype == at::kHalf) return "";
  return std::string("fused kernels multiply bfloat16 and float16, got ") + at::toString(dtype);
}

std::string why_no_ranks(int64_t num_ranks) {
  if (num_ranks <= kernels::cuda::kMaxPeers) return "";
  return "fused kernels serve at most " + std::to_string(kernels::cuda::kMaxPeers) +
         " ranks, got " + std::to_string(num_ranks);
}

kernels::DataType gemm_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf ? kernels::DataType::kFloat16 : kernels::DataType::kBFloat16;
}

GatheredPlace gathered_place(const char* op, const std::string& name) {
  if (name == "rows") return {Arriving::kRows, true};
  if (name == "columns") return {Arriving::kColumns, false};
  if (name == "inner_a") return {Arriving::kInner, true};
  TORCH_CHECK_VALUE(name == "inner", op,
                    ": arriving must be 'rows', 'columns', 'inner' or 'inner_a', got '", name, "'");
  return {Arriving::kInner, false};
}

AskedSumBroadcast named_sum_broadcast(const char* op, const std::string& name) {
  if (name == "copy_engine") return {SumBroadcast::kCopyEngine};
  if (name == "peer_stores") return {SumBroadcast::kPeerStores};
  if (name == "multicast") return {SumBroadcast::kMulticast};
  if (name == "switch") return {SumBroadcast::kSwitch};
  TORCH_CHECK_VALUE(name == "auto" || name == "any_order", op,
                    ": sum_broadcast must be 'auto', 'any_order', 'copy_engine', 'peer_stores', ",
                    "'multicast' or 'switch', got '", name, "'");
  return {std::nullopt, name == "any_order"};
}

GatherMatmul prepare_gather(const char* op, const at::Tensor& shard, const at::Tensor& other,
                            Arriving arriving, bool shard_is_a, int64_t num_ranks,
                            const Residency& residency) {
  TORCH_CHECK_VALUE(shard.is_contiguous(), op,
                    ": the shard must be rows without gaps, got strides ", shard.strides());
  check_matmul(op, "the shard", shard, "the other operand", other);
  const int64_t inner_size =
      arriving == Arriving::kInner ? shard.size(0) * num_ranks : shard.size(1);
  check_inner(op, "the gathered operand", inner_size, "the other operand",
              other.size(shard_is_a ? 0 : 1));
  FusedGemm gemm{};
  gemm.dtype = checked_dtype(op, shard);
  const int64_t count = shard.size(0) * num_ranks, width = shard.size(1);
  const bool inner = arriving == Arriving::kInner;
  gemm.k = inner ? count : width;
  if (shard_is_a) {
    gemm.m = inner ? width : count;
    gemm.n = other.size(1);
    gemm.a_transposed = inner;
    gemm.lda = width;
    set_b(op, gemm, other);
  } else {
    gemm.m = other.size(0);
    gemm.n = inner ? width : count;
    gemm.b_transposed = !inner;
    gemm.ldb = width;
    set_a(op, gemm, other);
  }
  gemm.ldd = gemm.n;
  require_supported(op, gemm, shard.device());
  const GatheredRows rows{
      .shard = shard.const_data_ptr(),
      .row_bytes = width * static_cast<int64_t>(shard.element_size()),
      .plan = {count, num_ranks, kernels::cuda::chunks_per_shard(shard.size(0))},
      .is_a = shard_is_a};
  const auto arrives =
      kernels::cuda::arriving_chunks(arriving, rows.plan, rows.row_bytes, residency.link);
  const LaunchConfig config =
      choose_config(op, gemm, shard.device(), residency, {.arriving = arrives});
  return {gemm, arriving, rows, config, kernels::cuda::gather_workspace_bytes(rows)};
}

FusedGemm describe_product(const char* op, const at::Tensor& a, const at::Tensor& b) {
  check_matmul(op, "a", a, "b", b);
  check_inner(op, "a.size(1)", a.size(1), "b.size(0)", b.size(0));
  FusedGemm gemm{};
  gemm.dtype = checked_dtype(op, a);
  gemm.m = a.size(0);
  gemm.n = b.size(1);
  gemm.k = a.size(1);
  gemm.ldd = gemm.n;
  set_a(op, gemm, a);
  set_b(op, gemm, b);
  return gemm;
}

void launch_product(const char* op, const FusedGemm& gemm, c10::Device device,
                    const std::string& tile) {
  TORCH_CHECK_NOT_IMPLEMENTED(gemm_source(device) == kernels::GemmSource::kCutlass, op,
                              ": only the kernels for sm_90 (CUTLASS) compute a product ",
                              "without a collective");
  require_supported(op, gemm, device);
  const LaunchConfig config =
      tile.empty() ? choose_config(op, gemm, device, {}) : config_of_tile(op, gemm, device, tile);
  const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
  AXONN_CUDA_CHECK(gemm_backend(op, device).launch(gemm, config, stream.stream()));
}

MatmulSum prepare_sum(const char* op, const at::Tensor& a, const at::Tensor& b, bool everywhere,
                      const AskedSumBroadcast& sum_broadcast, int64_t num_ranks,
                      const Residency& residency) {
  const FusedGemm gemm = describe_product(op, a, b);
  TORCH_CHECK_NOT_IMPLEMENTED(gemm.m % num_ranks == 0, op, ": algorithm='fused' needs a number of ",
                              "rows that ", num_ranks, " ranks divide, got ", gemm.m,
                              "; use 'auto', 'chunked' or 'sequential'");
  require_supported(op, gemm, a.device());
  const auto ranks = static_cast<int32_t>(num_ranks);
  const bool in_switch =
      everywhere && may_add_in_switch(op, gemm, sum_broadcast, ranks, a.device());
  const LaunchConfig config = choose_config(op, gemm, a.device(), residency,
                                            {.num_ranks = num_ranks, .in_switch = in_switch});
  const int64_t bytes = everywhere ? kernels::cuda::all_reduce_workspace_bytes(gemm, ranks)
                                   : kernels::cuda::reduce_scatter_workspace_bytes(gemm, ranks);
  return {gemm, config, everywhere, sum_broadcast, bytes};
}

at::Tensor run(const char* op, const GatherMatmul& call, const CallPlace& place,
               const at::TensorOptions& options) {
  auto output = at::empty({call.gemm.m, call.gemm.n}, options);
  FusedGemm gemm = call.gemm;
  gemm.d = output.mutable_data_ptr();
  enqueue(op, [&] {
    kernels::cuda::all_gather_gemm(place.peers, gemm_backend(op, options.device()), call.config,
                                   gemm, call.arriving, call.rows, place.transport, place.streams);
  });
  return output;
}

at::Tensor run(const char* op, const MatmulSum& call, const CallPlace& place,
               const at::TensorOptions& options) {
  const auto& peers = place.peers;
  const int64_t rows = call.everywhere ? call.gemm.m : call.gemm.m / peers.num_ranks;
  auto output = at::empty({rows, call.gemm.n}, options);
  const auto& backend = gemm_backend(op, options.device());
  enqueue(op, [&] {
    if (call.everywhere) {
      const AskedSumBroadcast& asked = call.sum_broadcast;
      const SumBroadcast way = asked.way ? *asked.way
                                         : choose_sum_broadcast(sum_broadcast_problem(
                                               peers, backend, call.gemm, asked.any_order));
      gemm_all_reduce(peers, backend, call.config, call.gemm, way, output.mutable_data_ptr(),
                      place.streams);
    } else {
      gemm_reduce_scatter(peers, backend, call.config, call.gemm, output.mutable_data_ptr(),
                          place.streams);
    }
  });
  return output;
}

}  // namespace axonn::ops::cuda
