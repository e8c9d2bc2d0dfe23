#include "ops/group/wait_bindings.h"

#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/ranks/waits.h"
#include "ops/group/group.h"

namespace axonn::ops {

namespace py = pybind11;

namespace {

// Notes a wait of the Python program for as long as a `with` block lasts.
class WaitBlock {
 public:
  explicit WaitBlock(comm::Wait wait) : wait_(std::move(wait)) {}
  void enter() { noted_.emplace(wait_); }
  void exit() { noted_.reset(); }

 private:
  comm::Wait wait_;
  std::optional<comm::NotedWait> noted_;
};

}  // namespace

void bind_waits(py::module_& m) {
  using comm::Wait;
  using comm::WaitClock;
  py::class_<Wait>(m, "Wait")
      .def_readonly("group", &Wait::group)
      .def_readonly("axis", &Wait::axis)
      .def_readonly("call", &Wait::call)
      .def_readonly("number", &Wait::number)
      .def_readonly("peers", &Wait::peers)
      .def_readonly("what", &Wait::what)
      .def_property_readonly("seconds", [](const Wait& wait) {
        return std::chrono::duration<double>(WaitClock::now() - wait.since).count();
      });
  py::class_<WaitBlock>(m, "noted_wait")
      .def(py::init([](const std::string& group, const std::string& axis, const std::string& call,
                       int64_t number, std::vector<int64_t> peers, const std::string& what,
                       double seconds) {
             const auto since = WaitClock::now() - std::chrono::duration_cast<WaitClock::duration>(
                                                       std::chrono::duration<double>(seconds));
             return std::make_unique<WaitBlock>(
                 comm::Wait{group, axis, call, number, std::move(peers), what, since});
           }),
           py::kw_only(), py::arg("group"), py::arg("axis"), py::arg("call"), py::arg("number"),
           py::arg("peers"), py::arg("what"), py::arg("seconds"))
      .def("__enter__", &WaitBlock::enter)
      .def("__exit__", [](WaitBlock& block, const py::args&) { block.exit(); });
  m.def("waits_under_way", &comm::waits_under_way);
  py::class_<GroupProgress>(m, "GroupProgress")
      .def_readonly("group", &GroupProgress::group)
      .def_readonly("axis", &GroupProgress::axis)
      .def_readonly("num_calls", &GroupProgress::num_calls)
      .def_readonly("last", &GroupProgress::last);
  m.def("group_progress", &group_progress, py::call_guard<py::gil_scoped_release>());
}

}  // namespace axonn::ops
