// Runs one rank of several. The shards of its peers lie in pinned host memory, from which the copy
// engine pulls them over PCIe while the GEMM runs. This is a real link of known speed, so overlap
// can be measured with one GPU.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda/fused/peer_state.h"
#include "ops/checks.h"
#include "ops/cuda/fused_matmul.h"
#include "ops/cuda/gemm_backend.h"
#include "ops/cuda/virtual_ranks.h"

namespace axonn::ops::cuda {
namespace {

using kernels::cuda::Arriving;
using kernels::cuda::kMaxPeers;
using kernels::cuda::kPadBytes;
using kernels::cuda::kStateBytes;
using kernels::cuda::Peers;
using kernels::cuda::PinnedState;

constexpr auto kLink = "EmulatedLink";
constexpr auto kGemm = "gemm";

class EmulatedLink {
 public:
  EmulatedLink(int64_t num_ranks, int64_t workspace_bytes, double timeout_seconds, int64_t device)
      : device_(c10::kCUDA, static_cast<c10::DeviceIndex>(device)),
        workspace_bytes_(workspace_bytes) {
    TORCH_CHECK_VALUE(num_ranks >= 1 && num_ranks <= kMaxPeers, kLink, ": num_ranks must be 1 to ",
                      kMaxPeers, ", got ", num_ranks);
    TORCH_CHECK_VALUE(timeout_seconds > 0, kLink, ": timeout_seconds must be positive, got ",
                      timeout_seconds);
    const c10::cuda::CUDAGuard guard(device_);
    copies_.emplace();
    const auto bytes = at::TensorOptions().dtype(at::kByte).device(device_);
    workspace_ = at::empty({workspace_bytes}, bytes);
    pad_ = at::zeros({kPadBytes + kStateBytes}, bytes);
    peers_.num_ranks = static_cast<int32_t>(num_ranks);
    peers_.limit = {static_cast<uint64_t>(timeout_seconds * 1e9), &pinned_.failure(), 0};
    peers_.epoch_to_push = pinned_.epoch_to_push();
    peers_.workspaces[0] = workspace_.mutable_data_ptr();
    set_own_pad(peers_, pad_.mutable_data_ptr());
  }

  // shards[0] is this rank's shard, on the device; the others are in pinned memory. Returns
  // cat(shards) @ b.
  at::Tensor all_gather_matmul(const std::vector<at::Tensor>& shards, const at::Tensor& b) {
    TORCH_CHECK_VALUE(static_cast<int32_t>(shards.size()) == peers_.num_ranks, kLink,
                      ": shards must be ", peers_.num_ranks, ", got ", shards.size());
    const void* addresses[kMaxPeers];
    for (size_t rank = 0; rank < shards.size(); ++rank) {
      const at::Tensor& shard = shards[rank];
      TORCH_CHECK_VALUE(shard.sizes() == shards[0].sizes() && shard.is_contiguous() &&
                            shard.scalar_type() == shards[0].scalar_type(),
                        kLink, ": shards must be contiguous and alike, got ", shard.sizes());
      TORCH_CHECK_VALUE(rank == 0 ? shard.device() == device_ : shard.is_pinned(), kLink,
                        ": shard ", rank, " must be ",
                        rank == 0 ? "on the device" : "in pinned memory");
      addresses[rank] = shard.const_data_ptr();
    }
    const c10::cuda::CUDAGuard guard(device_);
    const auto call = prepare_gather(kLink, shards[0], b, Arriving::kRows, /*shard_is_a=*/true,
                                     peers_.num_ranks, {.link = kernels::kNetwork});
    TORCH_CHECK_VALUE(call.workspace_bytes <= workspace_bytes_, kLink,
                      ": workspace_bytes=", workspace_bytes_, " but the call needs ",
                      call.workspace_bytes);
    auto output = at::empty({call.gemm.m, call.gemm.n}, shards[0].options());
    auto gemm = call.gemm;
    gemm.d = output.mutable_data_ptr();
    kernels::cuda::CopyEnginePull pull(addresses);
    kernels::cuda::all_gather_gemm(
        peers_, gemm_backend(kLink, device_), call.config, gemm, Arriving::kRows, call.rows, pull,
        copies_->behind(c10::cuda::getCurrentCUDAStream(device_.index()).stream()));
    return output;
  }

 private:
  c10::Device device_;
  int64_t workspace_bytes_;
  PinnedState pinned_;
  std::optional<kernels::cuda::CopyLane> copies_;  // made on the device
  at::Tensor workspace_, pad_;
  Peers peers_;
};

// Returns a @ b, computed by the fused kernel. With wait_chunks, A's rows are treated as the shards
// of four ranks with that many chunks each, whose flags are all set: they are zeros in `pad`, at
// epoch 0. This shows the cost of waiting when everything is there already. `tile` names the tile,
// like "128x256"; if it is empty, the one with the least modelled time is used.
at::Tensor gemm(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias,
                const std::optional<at::Tensor>& residual, int64_t wait_chunks,
                const std::optional<at::Tensor>& pad, const std::string& tile) {
  auto gemm = describe_product(kGemm, a, b);
  TORCH_CHECK_VALUE(!bias || (bias->sizes() == b.sizes().slice(1) && bias->is_contiguous()), kGemm,
                    ": bias must be contiguous, with ", b.size(1), " elements");
  TORCH_CHECK_VALUE(!residual || (residual->sizes() == at::IntArrayRef{a.size(0), b.size(1)} &&
                                  residual->is_contiguous()),
                    kGemm, ": residual must be contiguous, ", a.size(0), " x ", b.size(1));
  TORCH_CHECK_VALUE(wait_chunks == 0 || (pad && pad->numel() >= kPadBytes + kStateBytes), kGemm,
                    ": wait_chunks needs a pad of ", kPadBytes + kStateBytes, " bytes of zeros");
  const c10::cuda::CUDAGuard guard(a.device());
  auto output = at::empty({a.size(0), b.size(1)}, a.options());
  gemm.d = output.mutable_data_ptr();
  gemm.bias = bias ? bias->const_data_ptr() : nullptr;
  gemm.residual = residual ? residual->const_data_ptr() : nullptr;
  if (wait_chunks > 0) {
    Peers peers;
    set_own_pad(peers, pad->mutable_data_ptr());
    auto* failure = reinterpret_cast<kernels::cuda::SpinFailure*>(peers.counters + 64);
    gemm.arrivals = {.dim = Arriving::kRows,
                     .plan = {a.size(0), 4, wait_chunks},
                     .rank = 0,
                     .pad = peers.pads[0],
                     .epoch = peers.epoch,
                     .limit = {1'000'000'000, failure, 0}};
  }
  launch_product(kGemm, gemm, a.device(), tile);
  return output;
}

// Returns the tiles that `gemm` accepts, with the modelled microseconds of a @ b on each. If no
// tile is given, `gemm` takes the first of those with the least time.
std::vector<std::pair<std::string, double>> gemm_tiles(const at::Tensor& a, const at::Tensor& b) {
  std::vector<std::pair<std::string, double>> tiles;
  for (const auto& [config, us] :
       product_configs(kGemm, describe_product(kGemm, a, b), a.device())) {
    tiles.emplace_back(config.tile(), us);
  }
  return tiles;
}

}  // namespace

void bind_emulated_link(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("gemm", &gemm, py::arg("a"), py::arg("b"), py::kw_only(), py::arg("bias") = py::none(),
        py::arg("residual") = py::none(), py::arg("wait_chunks") = 0, py::arg("pad") = py::none(),
        py::arg("tile") = "");
  m.def("gemm_tiles", &gemm_tiles, py::arg("a"), py::arg("b"));
  m.attr("PAD_BYTES") = kPadBytes + kStateBytes;
  py::class_<EmulatedLink>(m, "EmulatedLink")
      .def(py::init<int64_t, int64_t, double, int64_t>(), py::arg("num_ranks"), py::kw_only(),
           py::arg("workspace_bytes"), py::arg("timeout_seconds") = 10.0, py::arg("device") = 0)
      .def("all_gather_matmul", &EmulatedLink::all_gather_matmul, py::arg("shards"), py::arg("b"));
}

}  // namespace axonn::ops::cuda
