// Computes products with kernels from other modules: axonn_ext._cuda, _cuda_sm90 and
// axonn_ext.kernels.triton. For a device, each module registers two ops, _mm_<kind>_candidates and
// _mm_<kind> (ops/schema.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "core/gemm/product_variant.h"
#include "ops/tuning/tuner.h"

namespace axonn::ops {

// The types of the functions that a kernel registers. The dispatcher requires exactly these types,
// so each module asserts that its own functions have them.
using KernelCandidates = std::vector<std::string>(const at::Tensor& a, const at::Tensor& b,
                                                  const std::optional<at::Tensor>& bias);
using KernelProduct = std::vector<at::Tensor>(const at::Tensor& a, const at::Tensor& b,
                                              const std::optional<at::Tensor>& bias,
                                              const std::string& name);

// Sets, by name, which kinds of kernels this process uses, and which it would use if `axonn-ext
// verify` had found them right here. Raises ValueError for a name that no kind has.
void configure_product_kernels(const std::vector<std::string>& used,
                               const std::vector<std::string>& unverified);

// Adds the kernels that exist for these operands: their names, and the versions that their times
// depend on. A kind that fails to list its kernels is left out, with a warning.
void add_kernels(Candidates& candidates, const at::Tensor& a, const at::Tensor& b,
                 const std::optional<at::Tensor>& bias);

// Returns a @ b (+ bias), computed by the kernel, or nothing if the kernel is not built, is not
// used in this process or does not take these operands.
std::optional<at::Tensor> mm_by_kernel(const tuning::ProductName& name, const at::Tensor& a,
                                       const at::Tensor& b, const std::optional<at::Tensor>& bias);

}  // namespace axonn::ops
