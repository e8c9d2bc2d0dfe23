#include "ops/cuda/communicator.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Logging.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "core/cuda/nccl/communicator.h"
#include "ops/checks.h"
#include "ops/group/c10d_store.h"

namespace axonn::ops::cuda {
namespace {

namespace py = pybind11;

cudaStream_t current_stream(int device) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
}

void check_buffer(const char* op, const char* name, const at::Tensor& t, int device) {
  TORCH_CHECK_VALUE(t.is_cuda() && t.device().index() == device && t.is_contiguous(), op, ": ",
                    name, " must be a contiguous tensor on cuda:", device, ", got one on ",
                    t.device(), " with strides ", t.strides());
}

void check_pair(const char* op, const at::Tensor& output, const at::Tensor& input,
                int64_t output_parts, int64_t input_parts, int device) {
  check_buffer(op, "output", output, device);
  check_buffer(op, "input", input, device);
  TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(), op, ": output has dtype ",
                   output.scalar_type(), " but input has ", input.scalar_type());
  TORCH_CHECK_VALUE(output.numel() * input_parts == input.numel() * output_parts, op,
                    ": output has ", output.numel(), " elements and input ", input.numel(),
                    ", expected a ratio of ", output_parts, " to ", input_parts);
}

// A call under way. It keeps its tensors until the stream that issued it has been made to wait. If
// that never happens, or if another stream waits, it tells the allocator which stream still uses
// them. It also keeps the grid alive, which owns that stream.
class Work {
 public:
  Work(std::shared_ptr<comm::CommunicatorGrid> grid, comm::PendingCall call,
       comm::Communicator& axis, std::vector<at::Tensor> tensors)
      : grid_(std::move(grid)),
        issued_on_(current_stream(grid_->device())),
        call_(std::move(call)),
        axis_(axis),
        tensors_(std::move(tensors)) {}
  ~Work() {
    try {
      record_use();
    } catch (const std::exception& error) {
      LOG(WARNING) << "axonn_ext: a collective was given up: " << error.what();
    }
  }
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  void wait() {
    const auto waiting = current_stream(grid_->device());
    call_.block(waiting);
    if (waiting != issued_on_) record_use();
    tensors_.clear();
  }

 private:
  // The memory's owner must record an event on that stream before freeing it, even after the grid
  // is gone.
  void record_use() {
    for (const auto& t : tensors_) {
      const auto stream =
          c10::cuda::getStreamFromExternal(axis_.stream_that_stays(), t.device().index());
      c10::cuda::CUDACachingAllocator::recordStream(t.storage().data_ptr(), stream);
    }
  }

  std::shared_ptr<comm::CommunicatorGrid> grid_;
  cudaStream_t issued_on_;
  comm::PendingCall call_;
  comm::Communicator& axis_;
  std::vector<at::Tensor> tensors_;
};

// A communicator that takes tensors and keeps its grid alive.
class Axis {
 public:
  Axis(std::shared_ptr<comm::CommunicatorGrid> grid, const std::string& name)
      : grid_(std::move(grid)), axis_(grid_->axis(name)) {}

  std::unique_ptr<Work> all_gather(const at::Tensor& output, const at::Tensor& input) {
    check_pair("all_gather", output, input, axis_.size(), 1, grid_->device());
    return work(axis_.all_gather(input.data_ptr(), output.data_ptr(), input.numel(),
                                 data_type(input.scalar_type()), current_stream(grid_->device())),
                output, input);
  }
  std::unique_ptr<Work> all_to_all(const at::Tensor& output, const at::Tensor& input) {
    check_pair("all_to_all", output, input, 1, 1, grid_->device());
    TORCH_CHECK_VALUE(input.numel() % axis_.size() == 0, "all_to_all: input has ", input.numel(),
                      " elements, expected a block for each of ", axis_.size(), " ranks");
    TORCH_CHECK_VALUE(input.numel() == 0 || input.data_ptr() != output.data_ptr(),
                      "all_to_all: output must have memory of its own, got that of input");
    return work(axis_.all_to_all(input.data_ptr(), output.data_ptr(), input.numel() / axis_.size(),
                                 data_type(input.scalar_type()), current_stream(grid_->device())),
                output, input);
  }
  std::unique_ptr<Work> all_reduce(const at::Tensor& output, const at::Tensor& input) {
    check_pair("all_reduce", output, input, 1, 1, grid_->device());
    return work(axis_.all_reduce(input.data_ptr(), output.data_ptr(), input.numel(),
                                 data_type(input.scalar_type()), current_stream(grid_->device())),
                output, input);
  }

 private:
  std::unique_ptr<Work> work(comm::PendingCall call, const at::Tensor& output,
                             const at::Tensor& input) {
    return std::make_unique<Work>(grid_, std::move(call), axis_,
                                  std::vector<at::Tensor>{output, input});
  }

  std::shared_ptr<comm::CommunicatorGrid> grid_;
  comm::Communicator& axis_;
};

std::shared_ptr<comm::CommunicatorGrid> make_grid(
    const std::string& group_name,
    const std::vector<std::pair<std::string, std::vector<int64_t>>>& axes, int64_t device,
    int64_t max_ctas, bool compare_calls, double timeout_seconds) {
  const auto group = c10d::resolve_process_group(group_name);
  const auto store = group->getStore();
  std::vector<comm::AxisRanks> ranks;
  for (const auto& [name, members] : axes) {
    if (members.size() > 1) ranks.push_back({name, members});
  }
  // Every rank makes its grids in the same order, so the counts agree and each key is used once.
  const int64_t instance = store->add("axonn/nccl/grids/" + std::to_string(group->getRank()), 1);
  // Destroying the grid joins the watching thread and aborts NCCL communicators, so it runs without
  // the GIL.
  const auto end = [](comm::CommunicatorGrid* grid) {
    std::optional<py::gil_scoped_release> no_gil;
    if (PyGILState_Check() != 0) no_gil.emplace();
    delete grid;
  };
  return {new comm::CommunicatorGrid(
              comm::CommunicatorOptions{.device = static_cast<int>(device),
                                        .max_ctas = static_cast<int>(max_ctas),
                                        .compare_calls = compare_calls,
                                        .timeout = std::chrono::duration<double>(timeout_seconds)},
              group->getRank(), group->getSize(), ranks, "axonn/nccl/" + std::to_string(instance),
              std::make_shared<C10dStore>(store), std::make_shared<C10dStore>(store->clone())),
          end};
}

}  // namespace

void bind_communicators(py::module_& m) {
  using Grid = comm::CommunicatorGrid;
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<Work>(m, "CommunicatorWork", "A collective under way on a communicator's stream.")
      .def("wait", &Work::wait, no_gil, "Makes the current stream wait; not the host.");
  py::class_<Axis>(m, "Communicator",
                   "The ranks along one axis; see csrc/core/cuda/nccl/communicator.h.")
      .def("all_gather", &Axis::all_gather, no_gil, py::arg("output"), py::arg("input"))
      .def("all_to_all", &Axis::all_to_all, no_gil, py::arg("output"), py::arg("input"))
      .def("all_reduce", &Axis::all_reduce, no_gil, py::arg("output"), py::arg("input"));
  py::class_<Grid, std::shared_ptr<Grid>>(m, "CommunicatorGrid")
      .def(py::init(&make_grid), no_gil, py::arg("group_name"), py::arg("axes"), py::kw_only(),
           py::arg("device"), py::arg("max_ctas"), py::arg("compare_calls"),
           py::arg("timeout_seconds"))
      .def("axis",
           [](std::shared_ptr<Grid> grid, const std::string& name) {
             return std::make_unique<Axis>(std::move(grid), name);
           })
      .def("check", &Grid::check, no_gil)
      .def("close", &Grid::close, no_gil);
}

}  // namespace axonn::ops::cuda
