// What both passes of a Linear begin with: their axes, their signature, and who makes the pass.
// Legend in linear_axes.h. "fused" is the CPU backend's; the others, and "auto" where an axis
// shares no memory, are composed of the other ops. So is "fused" on CUDA: what feeds a matmul or
// drains it is fused with it, and what is gathered on its own is c10d's.
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

// Checks what it is given; `op` opens the messages.
LinearAxes resolve_axes(const char* op, const std::vector<std::string>& names,
                        at::IntArrayRef sizes, bool sharded, int64_t gather_dim,
                        int64_t scatter_dim, const std::string& algorithm, c10::Device device);

// Whether the ranks of an axis can share out rows or features of a sum.
void check_scatter(const char* op, const char* what, std::array<int64_t, 2> sizes, int64_t dim,
                   int64_t group_size);

// What both passes have in common.
Signature signature_of(const char* op, const LinearAxes& axes);

// Of the whole tensors that a rank multiplies.
struct PassSizes {
  at::ScalarType dtype;
  int64_t rows, in_features, out_features;
};

// Why a GPU's "fused" cannot make one of the passes; empty: it can. Whichever products the flags of
// a call leave out, those of all are asked for.
std::string why_no_fused_linear(const LinearAxes& axes, const PassSizes& sizes);

// Runs a pass, fused or composed of ops of the given algorithm, once the ranks of `used`, the axes
// that it moves something along, agree on it. "auto" is measured where the ranks can agree on it;
// elsewhere it is "fused" or, where an axis shares no memory, "auto" of each op.
template <typename Fused, typename Composed>
auto choose_and_run(const LinearAxes& axes, std::initializer_list<Group*> used,
                    const PassSizes& sizes, bool is_empty, const Signature& signature,
                    Fused&& fused, Composed&& composed) {
  if (axes.alone() || (axes.asked == kAuto && axes.all.size == 1)) {
    const auto call = signature.call(axes.can_fuse() ? "fused" : "auto");
    if (axes.can_fuse()) return fused(call);
    // Each op then agrees on its own, too.
    agreed(call, axes.device, used, [] { return true; });
    return composed(kAuto);
  }
  // A rank needs its peers along the axes for its call to end, not theirs.
  const auto why_not = [&] { return why_no_fused_linear(axes, sizes); };
  const CallTraits traits{.device = axes.device,
                          .can_fuse = axes.can_fuse(),
                          .is_empty = is_empty,
                          .meets = false,
                          .why_no_fused = why_not,
                          .largest_group = std::max({axes.r.size, axes.s.size, axes.z.size})};
  return run_algorithm(axes.all, axes.asked, traits, signature, [&](Algorithm choice) {
    const auto call = signature.call(name_of(choice));
    if (choice == Algorithm::kFused && axes.device.is_cpu()) return fused(call);
    return agreed(call, axes.device, used, [&] { return composed(choice); });
  });
}

// What goes wrong among the ranks of one axis ends the call on all of them; see abandon().
template <typename... Rest>
auto run(const LinearAxes& axes, std::initializer_list<Group*> used, const PassSizes& sizes,
         Rest&&... rest) {
  return with_shared_fate(used, [&] { return choose_and_run(axes, used, sizes, rest...); });
}

}  // namespace axonn::ops::linear
