// Both passes of a Linear begin alike: with their axes, their signature, and the choice of who
// makes the pass. The legend is in linear_axes.h. "fused" is made by the CPU backend. The other
// algorithms, and "auto" where an axis shares no memory, are composed of the other ops. So is
// "fused" on CUDA: a gather that feeds a product, or a reduction that drains it, is fused with it;
// what is gathered on its own is gathered by c10d.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string>
#include <vector>

#include "ops/group/agreement.h"
#include "ops/linear_axes.h"
#include "ops/tuning/signature.h"
#include "ops/tuning/tuner.h"

namespace axonn::ops::linear {

// Resolves the axes and checks the arguments; `op` opens the messages.
LinearAxes resolve_axes(const char* op, const std::vector<std::string>& names,
                        at::IntArrayRef sizes, bool sharded, int64_t gather_dim,
                        int64_t scatter_dim, const std::string& algorithm, bool deterministic,
                        c10::Device device);

// Checks that the ranks of an axis can share out the rows or features of a sum.
void check_scatter(const char* op, const char* what, std::array<int64_t, 2> sizes, int64_t dim,
                   int64_t group_size);

// Begins the signature with what both passes have in common.
Signature signature_of(const char* op, const LinearAxes& axes);

// The sizes of the whole tensors that a rank multiplies.
struct PassSizes {
  at::ScalarType dtype;
  int64_t rows, in_features, out_features;
};

// Returns why "fused" on a GPU cannot make one of the passes, or an empty text if it can. It asks
// about all products, even about those that the flags of a call leave out.
std::string why_no_fused_linear(const LinearAxes& axes, const PassSizes& sizes);

// Runs a pass, fused or composed of ops with the given algorithm, once the ranks of `used` agree on
// it; these are the axes along which the pass moves something. "auto" is measured where the ranks
// of all axes can agree on it. Elsewhere it is "fused" or, where an axis shares no memory, "auto"
// of each op.
template <typename Fused, typename Composed>
auto choose_and_run(const LinearAxes& axes, std::initializer_list<Group*> used,
                    const PassSizes& sizes, bool is_empty, const Signature& signature,
                    Fused&& fused, Composed&& composed) {
  if (axes.alone() || (axes.asked == kAuto && axes.all.size == 1)) {
    const auto call = signature.call(axes.can_fuse() ? "fused" : "auto");
    if (axes.can_fuse()) return fused(call);
    // After that, each op makes its own agreement, too.
    agreed(call, axes.device, used, [] { return true; });
    return composed(kAuto);
  }
  // The call does not meet: a rank's call ends when its peers along the axes have come, but these
  // wait for other peers.
  const auto why_not = [&] { return why_no_fused_linear(axes, sizes); };
  const CallTraits traits{.device = axes.device,
                          .can_fuse = axes.can_fuse(),
                          .is_empty = is_empty,
                          .synchronizes = false,
                          .why_no_fused = why_not,
                          .largest_group = std::max({axes.r.size, axes.s.size, axes.z.size})};
  return run_algorithm(axes.all, axes.asked, traits, signature, [&](Algorithm choice) {
    const auto call = signature.call(name_of(choice));
    if (choice == Algorithm::kFused && axes.device.is_cpu()) return fused(call);
    return agreed(call, axes.device, used, [&] { return composed(choice); });
  });
}

// Runs a pass. An error among the ranks of one axis ends the call on all axes; see abandon().
template <typename... Rest>
auto run(const LinearAxes& axes, std::initializer_list<Group*> used, const PassSizes& sizes,
         Rest&&... rest) {
  return with_shared_fate(used, [&] { return choose_and_run(axes, used, sizes, rest...); });
}

}  // namespace axonn::ops::linear
