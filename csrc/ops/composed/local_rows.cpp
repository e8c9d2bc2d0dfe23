#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "ops/checks.h"
#include "ops/composed/register.h"

namespace axonn::ops {
namespace {

void check_range(const at::Tensor& ids, int64_t vocab_size, std::optional<int64_t> ignore_index,
                 const std::string& label, int64_t rank) {
  auto outside = (ids < 0).logical_or_(ids >= vocab_size);
  if (ignore_index) outside.logical_and_(ids != *ignore_index);
  if (!outside.any().item<bool>()) return;
  const auto places = outside.nonzero();
  const auto place = places[0].cpu();
  const auto* indices = place.const_data_ptr<int64_t>();
  const auto value = outside.dim() == 0 ? ids : ids.index({outside})[0];
  TORCH_CHECK_VALUE(false, label, " must lie in [0, ", vocab_size, ")",
                    ignore_index ? c10::str(" or be ", *ignore_index) : "", ", got ",
                    value.item<int64_t>(), " at position ", at::IntArrayRef(indices, place.numel()),
                    " on rank ", rank,
                    places.size(0) > 1 ? c10::str(" (and ", places.size(0) - 1, " more)") : "");
}

std::tuple<at::Tensor, at::Tensor> local_rows(const at::Tensor& ids, int64_t first,
                                              int64_t num_rows, int64_t vocab_size,
                                              std::optional<int64_t> ignore_index, bool check,
                                              const std::string& label, int64_t rank) {
  TORCH_CHECK_TYPE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, label,
                   " must be int64 or int32, got ", ids.scalar_type());
  if (check || ids.is_cpu()) check_range(ids, vocab_size, ignore_index, label, rank);
  const auto rows = ids - first;
  return {rows.clamp(0, num_rows - 1), (rows >= 0).logical_and_(rows < num_rows)};
}

}  // namespace

AXONN_REGISTER_OP(local_rows)

}  // namespace axonn::ops
