// One matrix product in several ways, and which of them is fastest: the library's choice for the
// layouts it is given can be several times slower than for others (AxoNN, SC'24, section V-C).
// All give the same values within rounding, each the same bits whenever it is repeated.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "ops/group.h"

namespace axonn::ops {

// a [M, K] @ b [K, N] -> [M, N], contiguous.
enum class Variant {
  kDirect,      // the library's, as it stands
  kTransposed,  // (b.t() @ a.t()).t(), copied into rows
  kRelayoutA,   // with a copied into its other layout
  kRelayoutB,   // with b copied into its other layout
  kFusedSm90,   // axonn_ext._cuda's GEMM; bfloat16 and float16 on sm_90
};

const char* name_of(Variant variant);
// ValueError for a name that is none's.
Variant variant_named(const std::string& name);

// Those that exist for these operands, kDirect first.
std::vector<Variant> variants_for(const at::Tensor& a, const at::Tensor& b);

// a @ b, plus `bias` [N] in each row, which kDirect adds on the way out on a GPU.
// NotImplementedError where the variant does not exist.
at::Tensor tuned_mm(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias,
                    Variant variant);

// How a product of a Linear is computed.
struct ProductChoice {
  // Whose ranks agree; they must ask for equal products in the same order. Null: always kDirect.
  const Group* agree;
  const char* name;  // "mm_forward", "mm_dgrad" or "mm_wgrad"

  // a @ b by the variant that a warm-up measured to be fastest; kDirect if none did. Not asked for:
  // products without an element and, on the CPU, those too small for a copy to pay.
  at::Tensor mm(const at::Tensor& a, const at::Tensor& b,
                const std::optional<at::Tensor>& bias = std::nullopt) const;
};

// Settles the choice for a product of this rank alone, and returns the name under which it is kept
// and listed; an empty one for a product that ProductChoice does not ask for.
std::string tune_product(const at::Tensor& a, const at::Tensor& b,
                         const std::optional<at::Tensor>& bias, const std::string& name);

}  // namespace axonn::ops
