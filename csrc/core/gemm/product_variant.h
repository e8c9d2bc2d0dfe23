// The ways to compute a product a @ b: their names, as ranks send them and as they are kept on
// disk, and when a result counts as right.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace axonn::tuning {

enum class Variant {
  kDirect,      // torch's, as it stands
  kTransposed,  // (b.t() @ a.t()).t(), copied into rows
  kRelayoutA,   // with a copied into its other layout
  kRelayoutB,   // with b copied into its other layout
  kFusedSm90,   // axonn_ext._cuda_sm90's GEMM
  kCublasLt,    // one algorithm of cuBLASLt, by name
  kTriton,      // axonn_ext.kernels.triton's matmul with one config, by name
};

// The ways that any device has, kDirect first; and those by kernels, which a build or a setting may
// lack.
inline constexpr std::array kLayoutVariants{Variant::kDirect, Variant::kTransposed,
                                            Variant::kRelayoutA, Variant::kRelayoutB};
inline constexpr std::array kKernelVariants{Variant::kCublasLt, Variant::kTriton,
                                            Variant::kFusedSm90};

// Returns direct, transposed, relayout_a, relayout_b, fused_sm90, cublaslt or triton.
const char* name_of(Variant variant);

// A way, and which algorithm or config of it is used, as in `cublaslt_66_20_36_1_0_0_3_0_5` or
// `triton_m128n256k64w8s3g8p1t`. The other ways have no such detail.
struct ProductName {
  Variant variant;
  std::string detail;

  bool operator==(const ProductName&) const = default;
};

std::string to_text(const ProductName& name);
// Returns nothing for a text that names no way.
std::optional<ProductName> parse_product(std::string_view text);

// The numbers that distinguish an algorithm of cuBLASLt from the others of one version
// (CUBLASLT_ALGO_CONFIG_*).
struct CublasLtConfig {
  int32_t id, tile, stages, split_k, reduction, swizzle, custom, inner_shape, cluster_shape;
};

// Returns the detail of its name: the numbers in their order.
std::string to_text(const CublasLtConfig& config);

// How far apart the elements of two right results may be, for operands that are drawn from the
// standard normal distribution, and a bias sqrt(k) times as large. So are the elements.
//   epsilon     of the dtype; of tf32, if float32 is rounded to it
//   is_double   sums are kept in float64, not in float32
// A result that lacks a term here and there passes; one that lacks a tile, a step of a thousandth
// of K, or the bias, does not.
double tolerated_difference(double epsilon, int64_t k, bool is_double);

}  // namespace axonn::tuning
