#include "ops/composed/group_arguments.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "ops/composed/fused_cuda.h"
#include "ops/emulation/emulated_links.h"

namespace axonn::ops {

AskedAlgorithm parse_algorithm(const char* op, const std::string& name, c10::Device device,
                               bool fused_on_cuda) {
  AskedAlgorithm asked = kAuto;
  for (const auto algorithm : kAlgorithms) {
    if (name == name_of(algorithm)) asked = algorithm;
  }
  TORCH_CHECK_VALUE(asked != kAuto || name == "auto", op,
                    ": algorithm must be 'auto', 'fused', 'chunked' or 'sequential', got '", name,
                    "'");
  if (asked != Algorithm::kFused || device.is_cpu()) return asked;
  TORCH_CHECK_NOT_IMPLEMENTED(fused_on_cuda && device.is_cuda(), op,
                              ": algorithm='fused' exists on cpu only so far, got tensors on ",
                              device, "; use 'auto', 'chunked' or 'sequential'");
  TORCH_CHECK_NOT_IMPLEMENTED(has_fused_on_cuda(), op,
                              ": algorithm='fused' cannot do this: ", kNotBuilt,
                              "; use 'auto', 'chunked' or 'sequential'");
  return asked;
}

Group resolve_group(const char* op, const std::string& name, int64_t size, AskedAlgorithm asked,
                    c10::Device device) {
  if (size == 1) return {.name = name};
  const auto process_group = c10d::resolve_process_group(name);
  TORCH_CHECK_VALUE(process_group->getSize() == size, op, ": group_size=", size, " but group '",
                    name, "' has ", process_group->getSize(), " ranks");
  const bool may_fuse = device.is_cpu() && (asked == kAuto || asked == Algorithm::kFused);
  const bool emulated = may_fuse && has_emulated_link(*process_group);
  TORCH_CHECK_VALUE(!emulated || asked == kAuto, op,
                    ": algorithm='fused' reads peers' memory in place, which no emulated link "
                    "(AXONN_EMULATED_LINKS) can slow down; use 'auto', 'chunked' or 'sequential'");
  auto group = find_group(op, name, process_group, device);
  group.may_fuse = may_fuse && !emulated;
  TORCH_CHECK_VALUE(asked != Algorithm::kFused || !device.is_cpu() || group.can_fuse(), op,
                    ": algorithm='fused' needs shared memory between all ranks of group '", name,
                    "', but ", obstacle_to_sharing(name),
                    "; use 'auto', 'chunked' or 'sequential'");
  if (asked == kAuto && device.is_cpu() && !emulated && !group.can_fuse() &&
      group.compared != nullptr && group.rank == 0 && ask_once(name)) {
    TORCH_WARN("axonn_ext: the ranks of group '", group.label(), "' share no memory, since ",
               obstacle_to_sharing(name), ". So algorithm='auto' does not fuse matmuls with this ",
               "group's collectives: it takes 'sequential' (c10d's collective, then the ",
               "library's matmul), or what a warm-up measures to be faster");
  }
  return group;
}

}  // namespace axonn::ops
