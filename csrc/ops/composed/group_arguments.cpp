#include "ops/composed/group_arguments.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "ops/composed/fused_cuda.h"
#include "ops/emulation/paced_links.h"

namespace axonn::ops {

void check_algorithm(const char* op, const std::string& algorithm, c10::Device device,
                     bool fused_on_cuda) {
  TORCH_CHECK_VALUE(algorithm == "auto" || algorithm == "fused" || algorithm == "chunked" ||
                        algorithm == "sequential",
                    op, ": algorithm must be 'auto', 'fused', 'chunked' or 'sequential', got '",
                    algorithm, "'");
  if (algorithm != "fused" || device.is_cpu()) return;
  TORCH_CHECK_NOT_IMPLEMENTED(fused_on_cuda && device.is_cuda(), op,
                              ": algorithm='fused' exists on cpu only so far, got tensors on ",
                              device, "; use 'auto', 'chunked' or 'sequential'");
  TORCH_CHECK_NOT_IMPLEMENTED(has_fused_on_cuda(), op,
                              ": algorithm='fused' cannot do this: ", kNotBuilt,
                              "; use 'auto', 'chunked' or 'sequential'");
}

Group resolve_group(const char* op, const std::string& name, int64_t size,
                    const std::string& algorithm, c10::Device device) {
  if (size == 1) return {.name = name};
  const auto process_group = c10d::resolve_process_group(name);
  TORCH_CHECK_VALUE(process_group->getSize() == size, op, ": group_size=", size, " but group '",
                    name, "' has ", process_group->getSize(), " ranks");
  const bool asked_for = algorithm == "fused" || algorithm == "auto";
  const bool paced = device.is_cpu() && asked_for && is_paced(*process_group);
  TORCH_CHECK_VALUE(!paced || algorithm == "auto", op,
                    ": algorithm='fused' reads peers' memory in place, which no emulated link "
                    "(AXONN_EMULATED_LINKS) can slow down; use 'auto', 'chunked' or 'sequential'");
  auto group = find_group(op, name, process_group, device);
  group.may_fuse = device.is_cpu() && asked_for && !paced;
  TORCH_CHECK_VALUE(algorithm != "fused" || !device.is_cpu() || group.can_fuse(), op,
                    ": algorithm='fused' needs shared memory between all ranks of group '", name,
                    "', but ", obstacle_to_sharing(name),
                    "; use 'auto', 'chunked' or 'sequential'");
  if (algorithm == "auto" && device.is_cpu() && !paced && !group.can_fuse() &&
      group.compared != nullptr && group.rank == 0 && ask_once(name)) {
    TORCH_WARN("axonn_ext: the ranks of group '", group.label(), "' share no memory, since ",
               obstacle_to_sharing(name), ". So algorithm='auto' does not fuse matmuls with this ",
               "group's collectives: it takes 'sequential' (c10d's collective, then the ",
               "library's matmul), or what a warm-up measures to be faster");
  }
  return group;
}

}  // namespace axonn::ops
