// What goldfish_labels checks and prepares on every backend.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <optional>
#include <vector>

#include "core/numeric/goldfish.h"
#include "ops/checks.h"

namespace axonn::ops {

inline constexpr auto kGoldfishLabels = "goldfish_labels";

// The operands in the form that kernels take, and the labels that they fill.
struct GoldfishCall {
  at::Tensor tokens;
  std::optional<at::Tensor> documents;
  at::Tensor labels;
  kernels::GoldfishRule rule;

  // Raises ValueError or TypeError, which name the argument.
  static GoldfishCall of(const at::Tensor& tokens, const std::optional<at::Tensor>& documents,
                         int64_t k, int64_t h, bool with_target) {
    constexpr auto kOp = kGoldfishLabels;
    check_ids("tokens", tokens);
    TORCH_CHECK_VALUE(tokens.dim() >= 1 && tokens.size(-1) >= 1, kOp,
                      ": tokens must have shape [.., S + 1], got ", tokens.sizes());
    TORCH_CHECK_VALUE(k >= 2, kOp, ": k must be at least 2, got ", k);
    TORCH_CHECK_VALUE(h >= 1, kOp, ": h must be at least 1, got ", h);
    std::optional<at::Tensor> numbers;
    if (documents) {
      check_ids("documents", *documents);
      TORCH_CHECK_VALUE(documents->sizes() == tokens.sizes(), kOp,
                        ": documents must have the shape of tokens, ", tokens.sizes(), ", got ",
                        documents->sizes());
      check_device(kOp, "tokens", tokens, "documents", *documents);
      numbers = documents->to(at::kLong).contiguous();
    }
    auto sizes = tokens.sizes().vec();
    sizes.back() -= 1;
    return {tokens.to(at::kLong).contiguous(), numbers,
            at::empty(sizes, tokens.options().dtype(at::kLong)),
            kernels::GoldfishRule::of(k, h, with_target)};
  }

  kernels::GoldfishRows rows() const {
    const int64_t length = tokens.size(-1);
    return {tokens.const_data_ptr<int64_t>(),
            documents ? documents->const_data_ptr<int64_t>() : nullptr, tokens.numel() / length,
            length};
  }

 private:
  static void check_ids(const char* name, const at::Tensor& t) {
    TORCH_CHECK_TYPE(t.scalar_type() == at::kLong || t.scalar_type() == at::kInt, kGoldfishLabels,
                     ": ", name, " must be int64 or int32, got ", t.scalar_type());
  }
};

}  // namespace axonn::ops
