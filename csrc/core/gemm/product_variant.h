// The ways to compute a product a @ b: their names, as ranks send them and as files store them, and
// when a result counts as correct.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace axonn::tuning {

enum class Variant {
  kDirect,      // torch's product, unchanged
  kTransposed,  // (b.t() @ a.t()).t(), copied to row-major order
  kRelayoutA,   // with a copied into its other layout
  kRelayoutB,   // with b copied into its other layout
  kFusedSm90,   // axonn_ext._cuda_sm90's GEMM
  kCublasLt,    // one cuBLASLt algorithm, by name
  kTriton,      // axonn_ext.kernels.triton's matmul with one config, by name
};

// The ways that every device has, kDirect first; and those that need kernels, which a build or a
// setting may lack.
inline constexpr std::array kLayoutVariants{Variant::kDirect, Variant::kTransposed,
                                            Variant::kRelayoutA, Variant::kRelayoutB};
inline constexpr std::array kKernelVariants{Variant::kCublasLt, Variant::kTriton,
                                            Variant::kFusedSm90};

// Returns direct, transposed, relayout_a, relayout_b, fused_sm90, cublaslt or triton.
const char* name_of(Variant variant);

// A way, and the algorithm or config that it uses, as in `cublaslt_66_20_36_1_0_0_3_0_5` or
// `triton_m128n256k64w8s3g8p1t`. The other ways have no such detail.
struct ProductName {
  Variant variant;
  std::string detail;

  bool operator==(const ProductName&) const = default;
};

std::string to_text(const ProductName& name);
// Returns nullopt if the text names no way.
std::optional<ProductName> parse_product(std::string_view text);

// The numbers that identify a cuBLASLt algorithm within one version of cuBLASLt
// (CUBLASLT_ALGO_CONFIG_*).
struct CublasLtConfig {
  int32_t id, tile, stages, split_k, reduction, swizzle, custom, inner_shape, cluster_shape;
};

// Returns the detail of the algorithm's name: the numbers in order.
std::string to_text(const CublasLtConfig& config);

// Returns how far the elements of two correct results may differ, for operands drawn from the
// standard normal distribution and a bias sqrt(k) times as large. The elements are that large, too.
//   epsilon     of the dtype; of tf32, if float32 is rounded to it
//   is_double   sums are kept in float64, not in float32
// A result that lacks a term here and there passes. One that lacks a tile, a thousandth of K or the
// bias does not.
double tolerated_difference(double epsilon, int64_t k, bool is_double);

}  // namespace axonn::tuning
