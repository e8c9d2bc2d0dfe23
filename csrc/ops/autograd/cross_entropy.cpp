// The gradient of cross-entropy; see calls.h.
#include "ops/cross_entropy.h"

#include <torch/library.h>

#include <string>
#include <tuple>

#include "ops/autograd/calls.h"
#include "ops/checks.h"
#include "ops/needs_grad.h"

namespace axonn::ops::autograd {
namespace {

using Pair = std::tuple<Tensor, Tensor>;

struct Labels {
  Tensor values;
  int64_t first_column, ignore_index;
};

Pair call_forward(const Tensor& logits, const Labels& labels, bool in_place,
                  const GroupArguments& g) {
  static const auto op =
      find<Pair(const Tensor&, const Tensor&, int64_t, int64_t, bool, const std::string&, int64_t,
                const std::string&)>("axonn::cross_entropy_forward");
  return op.call(logits, labels.values, labels.first_column, labels.ignore_index, in_place, g.name,
                 g.size, g.algorithm);
}

Tensor call_backward(const Tensor& dy, const Tensor& logits, const Labels& labels,
                     const Tensor& statistics) {
  static const auto op =
      find<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t)>(
          "axonn::cross_entropy_backward");
  return op.call(dy, logits, labels.values, statistics, labels.first_column, labels.ignore_index);
}

void call_backward_in_place(const Tensor& dy, const Tensor& logits, const Labels& labels,
                            const Tensor& statistics) {
  static const auto op =
      find<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t)>(
          "axonn::cross_entropy_backward_");
  op.call(dy, logits, labels.values, statistics, labels.first_column, labels.ignore_index);
}

struct CrossEntropyNode : Function<CrossEntropyNode> {
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const Labels& labels,
                               bool in_place, const GroupArguments& group) {
    const BelowAutograd below;
    auto [losses, statistics] = call_forward(logits, labels, in_place, group);
    ctx->mark_non_differentiable({statistics});
    ctx->set_materialize_grads(false);
    ctx->saved_data["first_column"] = labels.first_column;
    ctx->saved_data["ignore_index"] = labels.ignore_index;
    ctx->saved_data["in_place"] = in_place;
    ctx->saved_data["has_run"] = false;
    ctx->save_for_backward({logits, labels.values, statistics});
    return {losses, statistics};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(4);
    if (!grads[0].defined()) return result;
    const auto saved = ctx->get_saved_variables();  // raises if the logits have been overwritten
    const Tensor &logits = saved[0], &statistics = saved[2];
    const Labels labels{saved[1], ctx->saved_data["first_column"].toInt(),
                        ctx->saved_data["ignore_index"].toInt()};
    const bool in_place = ctx->saved_data["in_place"].toBool() && !at::GradMode::is_enabled() &&
                          has_dense_rows(logits);
    if (in_place) {
      // Autograd skips its version check under saved-tensor hooks, so a second run is noticed here.
      TORCH_CHECK(!ctx->saved_data["has_run"].toBool(),
                  "cross_entropy_forward: with in_place=True backward can run once only, since it "
                  "overwrites the logits");
      ctx->saved_data["has_run"] = true;
      call_backward_in_place(grads[0], logits.detach(), labels, statistics);
      result[0] = logits.detach();
    } else {
      result[0] = call_backward(grads[0], logits, labels, statistics);
    }
    return result;
  }
};

void check_operands(const char* op, const Tensor& logits, const Tensor& labels) {
  check_dense(op, "logits", logits);
  check_dense(op, "labels", labels);
  check_device(op, "logits", logits, "labels", labels);
}

Pair cross_entropy_forward(const Tensor& logits, const Tensor& labels, int64_t first_column,
                           int64_t ignore_index, bool in_place, const std::string& name,
                           int64_t size, const std::string& algorithm) {
  constexpr auto kOp = "cross_entropy_forward";
  const Labels own{labels, first_column, ignore_index};
  const GroupArguments group{name, size, algorithm};
  check_operands(kOp, logits, labels);
  if (needs_grad(kOp, {&logits})) {
    TORCH_CHECK_VALUE(!in_place || !logits.is_leaf(), kOp,
                      ": in_place=True needs logits that were computed, got a leaf that requires "
                      "a gradient, whose values backward would overwrite");
    const auto out = CrossEntropyNode::apply(logits, own, in_place, group);
    return {out[0], out[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_forward(logits, own, in_place, group);
}

struct CrossEntropyBackwardNode : Function<CrossEntropyBackwardNode> {
  static Tensor forward(AutogradContext*, const Tensor& dy, const Tensor& logits,
                        const Labels& labels, const Tensor& statistics) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_backward(dy, logits, labels, statistics);
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "cross_entropy_backward: cross-entropy can be differentiated once "
                                "only; leave create_graph=False");
  }
};

Tensor cross_entropy_backward(const Tensor& dy, const Tensor& logits, const Tensor& labels,
                              const Tensor& statistics, int64_t first_column,
                              int64_t ignore_index) {
  constexpr auto kOp = "cross_entropy_backward";
  const Labels own{labels, first_column, ignore_index};
  check_operands(kOp, logits, labels);
  check_dense(kOp, "dy", dy);
  check_dense(kOp, "statistics", statistics);
  if (needs_grad(kOp, {&dy, &logits})) {
    return CrossEntropyBackwardNode::apply(dy, logits, own, statistics);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_backward(dy, logits, own, statistics);
}

void cross_entropy_backward_(const Tensor& dy, const Tensor& logits, const Tensor& labels,
                             const Tensor& statistics, int64_t first_column, int64_t ignore_index) {
  constexpr auto kOp = "cross_entropy_backward_";
  check_operands(kOp, logits, labels);
  check_dense(kOp, "dy", dy);
  check_dense(kOp, "statistics", statistics);
  TORCH_CHECK_NOT_IMPLEMENTED(!needs_grad(kOp, {&dy, &logits}), kOp,
                              ": it has no gradient, but dy or logits requires one");
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_backward_in_place(dy, logits, {labels, first_column, ignore_index}, statistics);
  }
  // Autograd nodes that saved the logits must notice that they have changed.
  if (!logits.is_inference()) logits.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

TORCH_LIBRARY_IMPL(axonn, Autograd, m) {
  m.impl("cross_entropy_forward", &cross_entropy_forward);
  m.impl("cross_entropy_backward", &cross_entropy_backward);
  m.impl("cross_entropy_backward_", &cross_entropy_backward_);
}

}  // namespace axonn::ops::autograd
