#include "ops/cuda/virtual_ranks.h"

#include <ATen/cuda/Sleep.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/cuda/fused/peer_state.h"
#include "ops/checks.h"
#include "ops/cuda/fused_matmul.h"

namespace axonn::ops::cuda {
namespace {

using kernels::cuda::kMaxPeers;
using kernels::cuda::kPadBytes;
using kernels::cuda::kStateBytes;
using kernels::cuda::Peers;
using kernels::cuda::PinnedState;

constexpr auto kOp = "VirtualRanks";

// Each virtual rank has a workspace, flags, streams, and an equal share of the SMs, one of which is
// left to the small kernels that others wait for. The work of the ranks runs side by side, so
// waits, flags and deadlocks are those of real ranks; links are not.
class VirtualRanks {
 public:
  VirtualRanks(int64_t num_ranks, int64_t workspace_bytes, double timeout_seconds, int64_t device)
      : device_(c10::kCUDA, static_cast<c10::DeviceIndex>(device)),
        workspace_bytes_(workspace_bytes) {
    TORCH_CHECK_VALUE(num_ranks >= 1 && num_ranks <= kMaxPeers, kOp, ": num_ranks must be 1 to ",
                      kMaxPeers, ", got ", num_ranks);
    TORCH_CHECK_VALUE(workspace_bytes >= 0, kOp, ": workspace_bytes must not be negative, got ",
                      workspace_bytes);
    TORCH_CHECK_VALUE(timeout_seconds > 0, kOp, ": timeout_seconds must be positive, got ",
                      timeout_seconds);
    const c10::cuda::CUDAGuard guard(device_);
    begun_.emplace();
    Peers peers;
    peers.num_ranks = static_cast<int32_t>(num_ranks);
    const auto bytes = at::TensorOptions().dtype(at::kByte).device(device_);
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      memory_.push_back(at::empty({workspace_bytes}, bytes));
      peers.workspaces[rank] = memory_.back().mutable_data_ptr();
      memory_.push_back(at::zeros({kPadBytes + kStateBytes}, bytes));
      peers.pads[rank] = memory_.back().mutable_data_ptr();
    }
    for (int32_t rank = 0; rank < peers.num_ranks; ++rank) {
      const auto& pinned = *pinned_.emplace_back(std::make_unique<PinnedState>());
      peers.rank = rank;
      peers.limit = {static_cast<uint64_t>(timeout_seconds * 1e9), &pinned.failure(), rank};
      peers.epoch_to_push = pinned.epoch_to_push();
      set_own_pad(peers, peers.pads[rank]);
      ranks_.push_back(std::make_unique<Rank>(peers, device_.index()));
    }
  }

  std::vector<at::Tensor> all_gather_matmul(const std::vector<at::Tensor>& shards,
                                            const std::vector<at::Tensor>& others,
                                            const std::string& arriving,
                                            const std::set<int64_t>& absent) {
    const GatheredPlace place = gathered_place(kOp, arriving);
    check_operands("shards", shards);
    check_operands("others", others);
    return enqueue(shards, absent, [&](size_t rank) {
      return prepare_gather(kOp, shards[rank], others[rank], place.dim, place.is_a, size(),
                            residency());
    });
  }

  std::vector<at::Tensor> matmul_sum(const std::vector<at::Tensor>& as,
                                     const std::vector<at::Tensor>& bs, bool everywhere,
                                     const std::string& sum_broadcast,
                                     const std::set<int64_t>& absent) {
    const auto way = named_sum_broadcast(kOp, sum_broadcast);
    check_operands("a", as);
    check_operands("b", bs);
    return enqueue(as, absent, [&](size_t rank) {
      return prepare_sum(kOp, as[rank], bs[rank], everywhere, way, size(), residency());
    });
  }

  // Returns (rank, peer, chunk, epoch waited for, epoch seen) of the wait that failed, or None if
  // nothing has failed so far. Meant to be called after a CUDA error.
  pybind11::object failure() const {
    for (const auto& pinned : pinned_) {
      const auto& record = pinned->failure();
      if (record.state != kernels::cuda::SpinFailure::kWritten) continue;
      return pybind11::make_tuple(record.rank, record.peer, record.chunk, record.expected,
                                  record.seen);
    }
    return pybind11::none();
  }

  // From here on, each rank goes from call to call on its own: it starts a call when it has ended
  // the previous one, whatever the other ranks do, plus a random delay of up to
  // `max_delay_cycles`. Results may be read after join(); operands and results must live until
  // then.
  void run_apart(int64_t max_delay_cycles, int64_t seed) {
    apart_ = true;
    max_delay_cycles_ = max_delay_cycles;
    generator_.seed(static_cast<uint64_t>(seed));
    join_with_current(/*wait=*/false);
  }

  // Makes the current stream wait for all ranks. From now on, the ranks wait again for the current
  // stream before each call, as they did at first.
  void join() {
    apart_ = false;
    join_with_current(/*wait=*/true);
  }

 private:
  struct Rank {
    Rank(const Peers& peers, c10::DeviceIndex device)
        : peers(peers), compute(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device)) {}

    Peers peers;
    c10::cuda::CUDAStream compute;
    kernels::cuda::CopyLane copies;
    axonn::cuda::Event ended;
  };

  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }

  kernels::Residency residency() const { return {.ranks_per_device = size(), .producer_ctas = 1}; }

  void check_operands(const char* name, const std::vector<at::Tensor>& operands) const {
    TORCH_CHECK_VALUE(static_cast<int64_t>(operands.size()) == size(), kOp, ": ", name,
                      " must have a tensor for each of ", size(), " ranks, got ", operands.size());
    for (const auto& operand : operands) {
      TORCH_CHECK_VALUE(operand.dim() == 2 && operand.device() == device_, kOp, ": ", name,
                        " must be matrices on ", device_, ", got ", operand.sizes(), " on ",
                        operand.device());
    }
  }

  // If `wait`, makes the current stream wait for the ranks; otherwise makes the ranks wait for it.
  void join_with_current(bool wait) {
    const c10::cuda::CUDAGuard guard(device_);
    const auto current = c10::cuda::getCurrentCUDAStream().stream();
    if (!wait) AXONN_CUDA_CHECK(cudaEventRecord(begun_->get(), current));
    for (const auto& rank : ranks_) {
      const auto stream = rank->compute.stream();
      if (wait) AXONN_CUDA_CHECK(cudaEventRecord(rank->ended.get(), stream));
      AXONN_CUDA_CHECK(wait ? cudaStreamWaitEvent(current, rank->ended.get(), 0)
                            : cudaStreamWaitEvent(stream, begun_->get(), 0));
    }
  }

  // Returns the order in which the ranks' calls are enqueued; it is random if they run apart.
  std::vector<size_t> order() {
    std::vector<size_t> result(ranks_.size());
    std::iota(result.begin(), result.end(), size_t{0});
    if (apart_) std::shuffle(result.begin(), result.end(), generator_);
    return result;
  }

  void delay(const Rank& rank) {
    if (!apart_ || max_delay_cycles_ == 0) return;
    const c10::cuda::CUDAStreamGuard guard(rank.compute);
    at::cuda::sleep(static_cast<int64_t>(generator_() % static_cast<uint64_t>(max_delay_cycles_)));
  }

  // Enqueues each rank's call on its streams. Unless ranks run apart, the calls come after the
  // current stream's work so far and before its later work. Absent ranks do nothing and have no
  // result.
  template <typename Prepare>
  std::vector<at::Tensor> enqueue(const std::vector<at::Tensor>& operands,
                                  const std::set<int64_t>& absent, Prepare&& prepare) {
    const c10::cuda::CUDAGuard guard(device_);
    std::vector<decltype(prepare(size_t{0}))> calls;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      calls.push_back(prepare(rank));
      TORCH_CHECK_VALUE(calls.back().workspace_bytes <= workspace_bytes_, kOp,
                        ": workspace_bytes=", workspace_bytes_, " but the call needs ",
                        calls.back().workspace_bytes);
    }
    if (!apart_) join_with_current(/*wait=*/false);
    std::vector<at::Tensor> outputs(ranks_.size());
    for (const size_t index : order()) {
      if (absent.contains(static_cast<int64_t>(index))) continue;
      const Rank& rank = *ranks_[index];
      delay(rank);
      outputs[index] = run(kOp, calls[index],
                           {rank.peers, rank.copies.behind(rank.compute.stream()), transport_},
                           operands[index].options());
    }
    if (!apart_) join_with_current(/*wait=*/true);
    return outputs;
  }

  c10::Device device_;
  int64_t workspace_bytes_;
  bool apart_ = false;
  int64_t max_delay_cycles_ = 0;
  std::mt19937_64 generator_;
  std::optional<axonn::cuda::Event> begun_;  // made on the device
  kernels::cuda::CopyEnginePush transport_;
  std::vector<std::unique_ptr<PinnedState>> pinned_;
  std::vector<at::Tensor> memory_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace

void bind_virtual_ranks(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<VirtualRanks>(m, "VirtualRanks")
      .def(py::init<int64_t, int64_t, double, int64_t>(), py::arg("num_ranks"), py::kw_only(),
           py::arg("workspace_bytes"), py::arg("timeout_seconds") = 10.0, py::arg("device") = 0)
      .def("all_gather_matmul", &VirtualRanks::all_gather_matmul, py::arg("shards"),
           py::arg("others"), py::kw_only(), py::arg("arriving") = "rows",
           py::arg("absent") = std::set<int64_t>{})
      .def("matmul_sum", &VirtualRanks::matmul_sum, py::arg("a"), py::arg("b"), py::kw_only(),
           py::arg("everywhere") = false, py::arg("sum_broadcast") = "auto",
           py::arg("absent") = std::set<int64_t>{})
      .def("run_apart", &VirtualRanks::run_apart, py::kw_only(), py::arg("max_delay_cycles") = 0,
           py::arg("seed") = 0)
      .def("join", &VirtualRanks::join)
      .def("failure", &VirtualRanks::failure);
}

}  // namespace axonn::ops::cuda
