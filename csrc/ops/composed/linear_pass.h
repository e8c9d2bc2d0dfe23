// Both passes of a Linear begin in the same way: with their axes, their signature, and the choice
// of an algorithm. The legend is in linear_axes.h. The CPU backend runs "fused". The other
// algorithms, and "auto" if an axis shares no memory, are composed of the other ops. So is "fused"
// on CUDA: a gather that feeds a product, or a reduction that drains it, is fused with it; other
// gathers are run by c10d.
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

// Checks that the ranks of an axis can evenly split the rows or features of a sum.
void check_scatter(const char* op, const char* what, std::array<int64_t, 2> sizes, int64_t dim,
                   int64_t group_size);

// Begins the signature with the options that both passes have in common.
Signature signature_of(const char* op, const LinearAxes& axes);

// The sizes of the whole tensors that a rank multiplies.
struct PassSizes {
  at::ScalarType dtype;
  int64_t rows, in_features, out_features;
};

// Returns why "fused" on a GPU cannot run one of the passes, or an empty string if it can. It
// checks all products, even those that the flags of a call leave out.
std::string why_no_fused_linear(const LinearAxes& axes, const PassSizes& sizes);

// Runs a pass, fused or composed of ops with the given algorithm, once the ranks of `used` agree on
// it; these are the axes along which the pass moves data. "auto" is measured if the ranks of all
// axes can agree on it. Otherwise it means "fused" or, if an axis shares no memory, "auto" for each
// op.
template <typename Fused, typename Composed>
auto choose_and_run(const LinearAxes& axes, std::initializer_list<Group*> used,
                    const PassSizes& sizes, bool is_empty, const Signature& signature,
                    Fused&& fused, Composed&& composed) {
  if (axes.alone() || (axes.asked == kAuto && axes.all.size == 1)) {
    const auto call = signature.call(axes.can_fuse() ? "fused" : "auto");
    if (axes.can_fuse()) return fused(call);
    // Each op then makes its own agreement as well.
    agreed(call, axes.device, used, [] { return true; });
    return composed(kAuto);
  }
  // The call does not synchronize all ranks: on a rank it ends when its peers along the axes have
  // come, but ranks that share no axis with it may still be missing.
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
