#include "ops/overlap/orchestrator_bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "core/overlap/orchestrator_gathers.h"
#include "core/overlap/orchestrator_lanes.h"

namespace axonn::ops {

namespace py = pybind11;
using namespace axonn::orchestrator;

namespace {

std::vector<std::pair<int64_t, Phase>> predicted(const GatherPlan& plan) {
  std::vector<std::pair<int64_t, Phase>> uses;
  for (const auto& use : plan.order().predicted()) uses.emplace_back(use.weight, use.phase);
  return uses;
}

}  // namespace

void bind_orchestrator(py::module_& m) {
  py::enum_<Phase>(m, "Phase")
      .value("FORWARD", Phase::kForward)
      .value("BACKWARD", Phase::kBackward)
      .value("INFERENCE", Phase::kInference);
  py::enum_<ActionKind>(m, "ActionKind")
      .value("FREE", ActionKind::kFree)
      .value("GATHER", ActionKind::kGather);
  py::class_<Action>(m, "GatherAction")
      .def_readonly("kind", &Action::kind)
      .def_readonly("weight", &Action::weight);
  py::class_<GatherPlan>(m, "GatherPlan")
      .def(py::init<int64_t, int64_t>(), py::kw_only(), py::arg("num_prefetched"),
           py::arg("budget_bytes"))
      .def("add_weight", &GatherPlan::add_weight, py::arg("bytes"))
      .def("use", &GatherPlan::use, py::arg("weight"), py::arg("phase"))
      .def("release", &GatherPlan::release, py::arg("weight"))
      .def("end_pass", &GatherPlan::end_pass)
      .def("end_step", &GatherPlan::end_step)
      .def("predicted", &predicted)
      .def_property_readonly("bytes", &GatherPlan::bytes)
      .def_property_readonly("num_mispredictions", [](const GatherPlan& plan) {
        return plan.order().num_mispredictions();
      });
  py::class_<Task>(m, "LaneTask")
      .def_readonly("name", &Task::name)
      .def_readonly("sequence", &Task::sequence)
      .def_readonly("bytes", &Task::bytes)
      .def_readonly("submitted", &Task::submitted)
      .def_readonly("started", &Task::started)
      .def_readonly("finished", &Task::finished)
      .def_readonly("waited_from", &Task::waited_from)
      .def_readonly("waited_to", &Task::waited_to);
  py::class_<LaneTotals>(m, "LaneTotals")
      .def_readonly("name", &LaneTotals::name)
      .def_readonly("num_tasks", &LaneTotals::num_tasks)
      .def_readonly("bytes", &LaneTotals::bytes)
      .def_readonly("busy", &LaneTotals::busy)
      .def_readonly("exposed", &LaneTotals::exposed)
      .def_property_readonly("hidden", &LaneTotals::hidden);
  py::class_<Lanes>(m, "Lanes")
      .def(py::init<>())
      .def_static("now", &Lanes::now)
      .def("add_lane", &Lanes::add_lane, py::arg("name"))
      .def("submit", &Lanes::submit, py::arg("lane"), py::arg("name"), py::arg("bytes"))
      .def("finished", &Lanes::finished, py::arg("lane"), py::arg("sequence"))
      .def("retire", &Lanes::retire, py::arg("lane"), py::arg("sequence"), py::arg("waited_from"))
      .def(
          "retire_measured",
          [](Lanes& lanes, int64_t lane, int64_t sequence, double submitted, double finished,
             double waited_from, double waited_to) {
            lanes.retire_measured(lane, sequence, {submitted, finished, waited_from, waited_to});
          },
          py::arg("lane"), py::arg("sequence"), py::kw_only(), py::arg("submitted"),
          py::arg("finished"), py::arg("waited_from"), py::arg("waited_to"))
      .def("totals", &Lanes::totals, py::arg("lane"))
      .def("record", &Lanes::record, py::arg("on"))
      .def("take_records", &Lanes::take_records, py::arg("lane"));
}

}  // namespace axonn::ops
