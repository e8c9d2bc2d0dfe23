#include "core/gemm/product_variant.h"

#include <algorithm>
#include <cmath>

namespace axonn::tuning {
namespace {

constexpr std::array kAll{Variant::kDirect,    Variant::kTransposed, Variant::kRelayoutA,
                          Variant::kRelayoutB, Variant::kFusedSm90,  Variant::kCublasLt,
                          Variant::kTriton};

bool has_detail(Variant variant) {
  return variant == Variant::kCublasLt || variant == Variant::kTriton;
}

// Returns whether the text can be part of a bare TOML key, and contains none of the separators in
// texts that ranks send.
bool is_detail(std::string_view text) {
  const auto is_fit = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || c == '_';
  };
  return !text.empty() && std::all_of(text.begin(), text.end(), is_fit);
}

}  // namespace

const char* name_of(Variant variant) {
  switch (variant) {
    case Variant::kDirect:
      return "direct";
    case Variant::kTransposed:
      return "transposed";
    case Variant::kRelayoutA:
      return "relayout_a";
    case Variant::kRelayoutB:
      return "relayout_b";
    case Variant::kFusedSm90:
      return "fused_sm90";
    case Variant::kCublasLt:
      return "cublaslt";
    case Variant::kTriton:
      return "triton";
  }
  return "";
}

std::string to_text(const ProductName& name) {
  std::string text = name_of(name.variant);
  if (has_detail(name.variant)) text.append("_").append(name.detail);
  return text;
}

std::optional<ProductName> parse_product(std::string_view text) {
  for (const auto variant : kAll) {
    const std::string_view name = name_of(variant);
    if (!text.starts_with(name)) continue;
    const auto rest = text.substr(name.size());
    if (!has_detail(variant)) {
      if (rest.empty()) return ProductName{variant, ""};
    } else if (rest.starts_with('_') && is_detail(rest.substr(1))) {
      return ProductName{variant, std::string(rest.substr(1))};
    }
  }
  return std::nullopt;
}

std::string to_text(const CublasLtConfig& config) {
  std::string text;
  for (const int32_t number :
       {config.id, config.tile, config.stages, config.split_k, config.reduction, config.swizzle,
        config.custom, config.inner_shape, config.cluster_shape}) {
    if (!text.empty()) text += '_';
    text += std::to_string(number);
  }
  return text;
}

double tolerated_difference(double epsilon, int64_t k, bool is_double) {
  // The largest of a hundred million elements is 6 sqrt(k), and 8 sqrt(k) with a bias. Each of the
  // two results is rounded a few times: when it is stored, for each part of a split K and, in tf32,
  // when the operands are.
  constexpr double kLargest = 6.0;
  constexpr double kRoundings = 4.0;
  // A running sum of k terms is itself as large as sqrt(k); its rounding errors grow with its
  // length.
  const double sum_epsilon = is_double ? 0x1p-52 : 0x1p-23;
  const double size = std::sqrt(static_cast<double>(std::max<int64_t>(k, 1)));
  return kLargest * kRoundings * size * (epsilon + sum_epsilon * size);
}

}  // namespace axonn::tuning
