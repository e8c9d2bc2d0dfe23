// Cross-entropy over a vocabulary that is split over the ranks of a group. Three numbers per row
// cross ranks. Two ops touch the logits, in one pass each: _cross_entropy_scan reads them, and
// _cross_entropy_gradient also writes the gradient. ops/cpu and ops/cuda define both; this file
// defines them again in ATen's ops, for devices without a built kernel.
#include "ops/cross_entropy.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>

#include "ops/checks.h"
#include "ops/composed/collectives.h"
#include "ops/composed/group_arguments.h"
#include "ops/composed/register.h"

namespace axonn::ops {
namespace {

template <typename Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

at::Tensor call_scan(const at::Tensor& logits, const at::Tensor& labels, int64_t first_column,
                     int64_t ignore_index) {
  static const auto op = find<at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, int64_t)>(
      "axonn::_cross_entropy_scan");
  return op.call(logits, labels, first_column, ignore_index);
}

void call_gradient(const at::Tensor& dy, const at::Tensor& logits, const at::Tensor& labels,
                   const at::Tensor& statistics, int64_t first_column, int64_t ignore_index,
                   const at::Tensor& out) {
  static const auto op =
      find<void(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t,
                int64_t, const at::Tensor&)>("axonn::_cross_entropy_gradient");
  op.call(dy, logits, labels, statistics, first_column, ignore_index, out);
}

// --- Checks -------------------------------------------------------------------------------------

void check_logits(const char* op, const at::Tensor& logits, const at::Tensor& labels,
                  int64_t first_column) {
  const auto type = logits.scalar_type();
  TORCH_CHECK_TYPE(
      type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf, op,
      ": logits has dtype ", type, ", expected float32, float64, bfloat16 or float16");
  TORCH_CHECK_TYPE(labels.scalar_type() == at::kLong || labels.scalar_type() == at::kInt, op,
                   ": labels must be int64 or int32, got ", labels.scalar_type());
  TORCH_CHECK_VALUE(logits.dim() == 2 && labels.dim() == 1 && labels.size(0) == logits.size(0), op,
                    ": logits and labels must have shapes [rows, columns] and [rows], got ",
                    logits.sizes(), " and ", labels.sizes());
  check_device(op, "logits", logits, "labels", labels);
  TORCH_CHECK_VALUE(first_column >= 0, op, ": first_column must be at least 0, got ", first_column);
}

void check_rows(const char* op, const char* name, const at::Tensor& t, at::IntArrayRef shape,
                const at::Tensor& logits) {
  TORCH_CHECK_VALUE(t.sizes() == shape, op, ": ", name, " must have shape ", shape, ", got ",
                    t.sizes());
  TORCH_CHECK_TYPE(t.scalar_type() == statistics_dtype(logits), op, ": ", name, " has dtype ",
                   t.scalar_type(), ", expected ", statistics_dtype(logits));
  check_device(op, "logits", logits, name, t);
}

// --- The ops ------------------------------------------------------------------------------------

// Combines the ranks' maxima, sums and label logits into those of whole rows, on every rank.
void join(Group& group, at::Tensor& found) {
  const auto top = agree_and_all_reduce(group, found[0], /*maximum=*/true);
  found[1].mul_((found[0] - top).exp_());
  const auto sums = agree_and_all_reduce(group, found.narrow(0, 1, 2), /*maximum=*/false);
  found[0].copy_(top);
  found.narrow(0, 1, 2).copy_(sums);
}

std::tuple<at::Tensor, at::Tensor> cross_entropy_forward(
    const at::Tensor& logits, const at::Tensor& labels, int64_t first_column, int64_t ignore_index,
    bool /*in_place: for backward*/, const std::string& group_name, int64_t group_size,
    const std::string& algorithm) {
  constexpr auto kOp = "cross_entropy_forward";
  check_group_size(kOp, group_size);
  check_logits(kOp, logits, labels, first_column);
  const auto asked = parse_algorithm(kOp, algorithm, logits.device());
  const auto rows = has_dense_rows(logits) ? logits : logits.contiguous();
  auto found = call_scan(rows, labels.to(at::kLong).contiguous(), first_column, ignore_index);
  if (group_size > 1) {
    auto group = resolve_group(kOp, group_name, group_size, asked, logits.device());
    join(group, found);
  }
  // The difference comes first: it is exact for large logits; adding the logarithm to one is not.
  auto losses = (found[0] - found[2]).add_(found[1].log());
  losses.masked_fill_(labels == ignore_index, 0);
  return {losses, found.narrow(0, 0, 2).clone()};
}

void write_gradient(const char* op, const at::Tensor& dy, const at::Tensor& logits,
                    const at::Tensor& labels, const at::Tensor& statistics, int64_t first_column,
                    int64_t ignore_index, const at::Tensor& out) {
  check_logits(op, logits, labels, first_column);
  check_rows(op, "dy", dy, {logits.size(0)}, logits);
  check_rows(op, "statistics", statistics, {2, logits.size(0)}, logits);
  const auto rows = has_dense_rows(logits) ? logits : logits.contiguous();
  call_gradient(dy.contiguous(), rows, labels.to(at::kLong).contiguous(), statistics.contiguous(),
                first_column, ignore_index, out);
}

at::Tensor cross_entropy_backward(const at::Tensor& dy, const at::Tensor& logits,
                                  const at::Tensor& labels, const at::Tensor& statistics,
                                  int64_t first_column, int64_t ignore_index) {
  auto gradient = at::empty(logits.sizes(), logits.options());
  write_gradient("cross_entropy_backward", dy, logits, labels, statistics, first_column,
                 ignore_index, gradient);
  return gradient;
}

void cross_entropy_backward_(const at::Tensor& dy, const at::Tensor& logits,
                             const at::Tensor& labels, const at::Tensor& statistics,
                             int64_t first_column, int64_t ignore_index) {
  constexpr auto kOp = "cross_entropy_backward_";
  TORCH_CHECK_VALUE(logits.dim() != 2 || has_dense_rows(logits), kOp,
                    ": logits must have rows of neighbouring elements that do not overlap, got "
                    "strides ",
                    logits.strides(), " of shape ", logits.sizes());
  write_gradient(kOp, dy, logits, labels, statistics, first_column, ignore_index, logits);
}

// --- Rows in ATen's ops -------------------------------------------------------------------------

// Returns how many rows take 16 MiB in fp32, to bound the memory needed in addition to the logits.
int64_t rows_at_once(const at::Tensor& logits) {
  return std::max<int64_t>(1, (int64_t{1} << 22) / std::max<int64_t>(1, logits.size(1)));
}

// Some rows of the logits in the dtype of the statistics, and where their labels are.
struct Block {
  at::Tensor wide, has_label, is_here, column;

  static Block of(const at::Tensor& logits, const at::Tensor& labels, int64_t first_column,
                  int64_t ignore_index, int64_t begin, int64_t count) {
    const auto label = labels.narrow(0, begin, count);
    const auto column = label - first_column;
    const auto has_label = label != ignore_index;
    const auto is_here =
        (column >= 0).logical_and_(column < logits.size(1)).logical_and_(has_label);
    return {logits.narrow(0, begin, count).to(statistics_dtype(logits)), has_label, is_here,
            column.clamp(0, std::max<int64_t>(0, logits.size(1) - 1)).unsqueeze(1)};
  }
};

at::Tensor scan_rows(const at::Tensor& logits, const at::Tensor& labels, int64_t first_column,
                     int64_t ignore_index) {
  auto found = at::empty({3, logits.size(0)}, logits.options().dtype(statistics_dtype(logits)));
  const int64_t step = rows_at_once(logits);
  for (int64_t begin = 0; begin < logits.size(0); begin += step) {
    const int64_t count = std::min(step, logits.size(0) - begin);
    const auto b = Block::of(logits, labels, first_column, ignore_index, begin, count);
    const auto part = found.narrow(1, begin, count);
    if (logits.size(1) == 0) {
      part[0].fill_(-std::numeric_limits<double>::infinity());
      part.narrow(0, 1, 2).zero_();
    } else {
      part[0].copy_(b.wide.amax(1));
      const auto label_logit = b.wide.gather(1, b.column).squeeze(1);
      part[2].copy_(at::where(b.is_here, label_logit, 0));
      const auto shift =
          part[0].masked_fill(part[0] == -std::numeric_limits<double>::infinity(), 0);
      part[1].copy_((b.wide - shift.unsqueeze(1)).exp_().sum(1));
    }
    part[0].masked_fill_(b.has_label.logical_not(), 0);
    part[1].masked_fill_(b.has_label.logical_not(), 1);
  }
  return found;
}

void write_rows(const at::Tensor& dy, const at::Tensor& logits, const at::Tensor& labels,
                const at::Tensor& statistics, int64_t first_column, int64_t ignore_index,
                const at::Tensor& out) {
  const int64_t step = rows_at_once(logits);
  for (int64_t begin = 0; logits.size(1) > 0 && begin < logits.size(0); begin += step) {
    const int64_t count = std::min(step, logits.size(0) - begin);
    auto b = Block::of(logits, labels, first_column, ignore_index, begin, count);
    const auto part = statistics.narrow(1, begin, count), own_dy = dy.narrow(0, begin, count);
    auto gradient = (b.wide - part[0].unsqueeze(1)).exp_().mul_((own_dy / part[1]).unsqueeze(1));
    gradient.scatter_add_(1, b.column, at::where(b.is_here, -own_dy, 0).unsqueeze(1));
    gradient.masked_fill_(b.has_label.logical_not().unsqueeze(1), 0);
    out.narrow(0, begin, count).copy_(gradient);
  }
}

}  // namespace

AXONN_REGISTER_OP(cross_entropy_forward)
AXONN_REGISTER_OP(cross_entropy_backward)
AXONN_REGISTER_OP(cross_entropy_backward_)

// Kernels registered for a device take precedence over these.
TORCH_LIBRARY_IMPL(axonn, CompositeExplicitAutograd, m) {
  m.impl("_cross_entropy_scan", &scan_rows);
  m.impl("_cross_entropy_gradient", &write_rows);
}

}  // namespace axonn::ops
