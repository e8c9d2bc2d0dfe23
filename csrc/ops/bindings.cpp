// The Python module axonn_ext._C. Importing it registers the ops with torch.library. The module
// itself holds the few functions that are not ops.
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

#include "core/cuda/fused/workspace_size.h"
#include "ops/composed/fused_cuda.h"
#include "ops/composed/fused_settings.h"
#include "ops/emulation/emulated_links.h"
#include "ops/group/group.h"
#include "ops/group/mailbox.h"
#include "ops/group/message_bindings.h"
#include "ops/group/wait_bindings.h"
#include "ops/left_out.h"
#include "ops/overlap/orchestrator_bindings.h"
#include "ops/tuning/measure.h"
#include "ops/tuning/product_kernels.h"
#include "ops/tuning/tuner.h"

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

// Collective. `key` must be used only once in the life of the group.
bool all_say_the_same(const std::string& group_name, const std::string& key,
                      const std::string& word) {
  const auto process_group = c10d::resolve_process_group(group_name);
  const axonn::ops::Group group{group_name, process_group->getRank(), process_group->getSize(),
                                nullptr};
  axonn::ops::Mailbox mailbox(group, process_group->getStore(), "axonn/words/" + key + "/",
                              "all_say_the_same", axonn::ops::timeout_seconds());
  return axonn::ops::all_say_the_same(group, mailbox, word);
}

// Returns the emulated link of the named group, or null.
std::shared_ptr<axonn::comm::EmulatedLink> emulated_link(const std::string& group_name) {
  return axonn::ops::find_link(group_name, c10d::resolve_process_group(group_name));
}

void bind_emulated_link(pybind11::module_& m) {
  using axonn::comm::EmulatedLink;
  using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;
  pybind11::class_<EmulatedLink, std::shared_ptr<EmulatedLink>>(m, "EmulatedLink")
      .def("begin", &EmulatedLink::begin, pybind11::arg("bytes"))
      .def(
          "end",
          [](EmulatedLink& link, int64_t number) {
            return link.end(number).time_since_epoch().count();
          },
          NoGil(), pybind11::arg("number"));
  m.def("emulated_link", &emulated_link, NoGil(), pybind11::arg("group_name"));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("has_fused_on_cuda", &axonn::ops::has_fused_on_cuda);
  m.def("left_out", &axonn::ops::left_out);
  m.def(
      "configure",
      [](double timeout_seconds, int64_t symmetric_memory_bytes, int64_t fused_nccl_sms,
         std::optional<int64_t> fused_free_sms, bool graphs_in_turn, const std::string& cache_dir,
         const std::vector<std::string>& product_kernels,
         const std::vector<std::string>& unverified_kernels, int64_t verified_fused_ranks,
         bool suggest_verify, const std::string& machine, const std::string& torch,
         const std::string& axonn_ext, const std::map<std::string, double>& emulated_links,
         bool debug_collectives) {
        axonn::ops::configure_product_kernels(product_kernels, unverified_kernels);
        axonn::ops::configure_groups({timeout_seconds, symmetric_memory_bytes, debug_collectives});
        axonn::ops::configure_fused_on_cuda({fused_nccl_sms, fused_free_sms, graphs_in_turn});
        axonn::ops::configure_tuning({timeout_seconds,
                                      cache_dir,
                                      {machine, torch, axonn_ext},
                                      {verified_fused_ranks, suggest_verify}});
        axonn::ops::configure_links(emulated_links);
      },
      pybind11::call_guard<pybind11::gil_scoped_release>(), pybind11::kw_only(),
      pybind11::arg("timeout_seconds"), pybind11::arg("symmetric_memory_bytes"),
      pybind11::arg("fused_nccl_sms"), pybind11::arg("fused_free_sms"),
      pybind11::arg("graphs_in_turn"), pybind11::arg("cache_dir"), pybind11::arg("product_kernels"),
      pybind11::arg("unverified_kernels"), pybind11::arg("verified_fused_ranks"),
      pybind11::arg("suggest_verify"), pybind11::arg("machine"), pybind11::arg("torch"),
      pybind11::arg("axonn_ext"), pybind11::arg("emulated_links"),
      pybind11::arg("debug_collectives"));
  m.def("add_busy_sms", &axonn::ops::add_busy_sms, pybind11::arg("device"), pybind11::arg("sms"),
        "Adds to the number of SMs that collectives use on a GPU; negative when they have ended.");
  m.def("free_sms_on", &axonn::ops::free_sms_on, pybind11::arg("device"),
        "The SMs that fused GEMMs leave free on a GPU now.");
  m.def(
      "fused_workspace_bytes",
      [](int64_t bytes) {
        using namespace axonn::kernels::cuda;
        return memory_bytes(bytes, kFrontBytes, kPageBytes);
      },
      pybind11::arg("bytes"),
      "The GPU memory that a group takes whose largest fused call needs a workspace of `bytes`.");
  m.def(
      "algorithm_candidates",
      [](bool is_cpu, bool shares_memory, bool is_supported, int64_t num_ranks,
         int64_t verified_ranks) {
        const auto all = axonn::ops::algorithm_candidates(
            {is_cpu, shares_memory, is_supported, num_ranks, verified_ranks});
        return std::pair(all.names, all.names[all.preferred]);
      },
      pybind11::kw_only(), pybind11::arg("is_cpu"), pybind11::arg("shares_memory"),
      pybind11::arg("is_supported"), pybind11::arg("num_ranks"), pybind11::arg("verified_ranks"),
      "What 'auto' may choose between, and the default.");
  m.def("symmetric_memory_bytes_in_use", &axonn::ops::symmetric_memory_bytes_in_use,
        pybind11::call_guard<pybind11::gil_scoped_release>(),
        "Bytes of symmetric memory that this rank has used in all of its groups.");
  m.def("waited_seconds", &axonn::ops::waited_seconds,
        pybind11::call_guard<pybind11::gil_scoped_release>(),
        "Seconds that this process has waited for peers inside ops, by group name.");
  m.def("all_say_the_same", &all_say_the_same, pybind11::call_guard<pybind11::gil_scoped_release>(),
        pybind11::arg("group_name"), pybind11::kw_only(), pybind11::arg("key"),
        pybind11::arg("word"),
        "Whether every rank of the group says the same word, and none an empty one.");
  m.def("enter_warm_up", &axonn::ops::enter_warm_up);
  m.def("leave_warm_up", &axonn::ops::leave_warm_up);
  m.def("tuning_choices", &tuning_choices, pybind11::call_guard<pybind11::gil_scoped_release>(),
        "(group, signature, algorithm, source, median_us) of every signature met.");
  m.def("clear_tuning_choices", &axonn::ops::clear_tuning_choices,
        pybind11::call_guard<pybind11::gil_scoped_release>());
  axonn::ops::bind_orchestrator(m);
  bind_emulated_link(m);
  axonn::ops::bind_messages(m);
  axonn::ops::bind_waits(m);
}
