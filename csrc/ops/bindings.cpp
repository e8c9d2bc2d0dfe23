// The Python module axonn_ext._C. Importing it registers the ops with torch.library; what it holds
// itself is the few functions that are no ops.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/fused_cuda.h"
#include "ops/fused_settings.h"
#include "ops/group.h"
#include "ops/left_out.h"
#include "ops/orchestrator_bindings.h"
#include "ops/paced_links.h"
#include "ops/product_kernels.h"
#include "ops/tuner.h"

namespace {

// group, signature, algorithm, source, median_us
using ChoiceTuple = std::tuple<std::string, std::string, std::string, std::string,
                               std::vector<std::pair<std::string, double>>>;

std::vector<ChoiceTuple> tuning_choices() {
  std::vector<ChoiceTuple> tuples;
  for (auto& choice : axonn::ops::tuning_choices()) {
    tuples.emplace_back(choice.group, choice.signature, choice.algorithm, name_of(choice.source),
                        choice.median_us);
  }
  return tuples;
}

using Medians = std::vector<std::pair<std::string, double>>;

// (choice, median_us) if there is a record, and why one that is there is of no use, or "".
std::pair<std::optional<std::pair<std::string, Medians>>, std::string> find_measurement(
    const std::string& signature) {
  auto found = axonn::ops::find_measurement(signature);
  if (!found.record) return {std::nullopt, std::move(found.problem)};
  return {std::pair(std::move(found.record->algorithm), std::move(found.record->median_us)), ""};
}

std::string keep_measurement(const std::string& signature, const std::string& choice,
                             const Medians& median_us) {
  return axonn::ops::keep_measurement({signature, choice, median_us});
}

// The emulated link of the group of that name, or null.
std::shared_ptr<axonn::comm::PacedLink> paced_link(const std::string& group_name) {
  return axonn::ops::find_link(group_name, c10d::resolve_process_group(group_name));
}

void bind_paced_link(pybind11::module_& m) {
  using axonn::comm::PacedLink;
  using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;
  pybind11::class_<PacedLink, std::shared_ptr<PacedLink>>(m, "PacedLink")
      .def("begin", &PacedLink::begin, pybind11::arg("bytes"))
      .def(
          "end",
          [](PacedLink& link, int64_t number) {
            return link.end(number).time_since_epoch().count();
          },
          NoGil(), pybind11::arg("number"));
  m.def("paced_link", &paced_link, NoGil(), pybind11::arg("group_name"));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("has_fused_on_cuda", &axonn::ops::has_fused_on_cuda);
  m.def("left_out", &axonn::ops::left_out);
  m.def(
      "configure",
      [](double timeout_seconds, int64_t symmetric_memory_bytes, int64_t fused_nccl_sms,
         const std::string& cache_dir, const std::vector<std::string>& product_kernels,
         const std::string& machine, const std::string& torch, const std::string& axonn_ext,
         const std::map<std::string, double>& emulated_links) {
        axonn::ops::configure_product_kernels(product_kernels);
        axonn::ops::configure_groups({timeout_seconds, symmetric_memory_bytes});
        axonn::ops::configure_fused_on_cuda(fused_nccl_sms);
        axonn::ops::configure_tuning({timeout_seconds, cache_dir, {machine, torch, axonn_ext}});
        axonn::ops::configure_links(emulated_links);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>(), pybind11::kw_only(),
      pybind11::arg("timeout_seconds"), pybind11::arg("symmetric_memory_bytes"),
      pybind11::arg("fused_nccl_sms"), pybind11::arg("cache_dir"), pybind11::arg("product_kernels"),
      pybind11::arg("machine"), pybind11::arg("torch"), pybind11::arg("axonn_ext"),
      pybind11::arg("emulated_links"));
  m.def("symmetric_memory_bytes_in_use", &axonn::ops::symmetric_memory_bytes_in_use,
        pybind11::call_guard<pybind11::gil_scoped_release>(),
        "Bytes of symmetric memory that this rank has used in all of its groups.");
  m.def("waited_seconds", &axonn::ops::waited_seconds,
        pybind11::call_guard<pybind11::gil_scoped_release>(),
        "Seconds that this process has waited for peers inside ops, by group name.");
  m.def("enter_warm_up", &axonn::ops::enter_warm_up);
  m.def("leave_warm_up", &axonn::ops::leave_warm_up);
  m.def("tuning_choices", &tuning_choices, pybind11::call_guard<pybind11::gil_scoped_release>(),
        "(group, signature, algorithm, source, median_us) of every signature met.");
  m.def("clear_tuning_choices", &axonn::ops::clear_tuning_choices,
        pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("find_measurement", &find_measurement, pybind11::call_guard<pybind11::gil_scoped_release>(),
        pybind11::arg("signature"));
  m.def("keep_measurement", &keep_measurement, pybind11::call_guard<pybind11::gil_scoped_release>(),
        pybind11::arg("signature"), pybind11::arg("choice"), pybind11::arg("median_us"));
  axonn::ops::bind_orchestrator(m);
  bind_paced_link(m);
}
