// Products by kernels that other modules bring: axonn_ext._cuda, _cuda_sm90 and axonn_ext.triton.
// Each registers two ops, _mm_<kind>_candidates and _mm_<kind> (ops/schema.cpp), for a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "core/gemm/product_variant.h"
#include "ops/tuning/tuner.h"

namespace axonn::ops {

// What a kernel is registered as. The dispatcher compares types of functions to the letter, so each
// module asserts that its own are these.
using KernelCandidates = std::vector<std::string>(const at::Tensor& a, const at::Tensor& b,
                                                  const std::optional<at::Tensor>& bias);
using KernelProduct = std::vector<at::Tensor>(const at::Tensor& a, const at::Tensor& b,
                                              const std::optional<at::Tensor>& bias,
                                              const std::string& name);

// Which kinds of kernels are used in this process, and which would be if `axonn-ext verify` had
// found them right here, by name. Raises ValueError for a name that is none's.
void configure_product_kernels(const std::vector<std::string>& used,
                               const std::vector<std::string>& unverified);

// Adds what there is for these operands: names, and the versions that times depend on. A kind that
// fails to say what it has is left out, with a warning.
void add_kernels(Candidates& candidates, const at::Tensor& a, const at::Tensor& b,
                 const std::optional<at::Tensor>& bias);

// a @ b (+ bias) by the kernel. Nothing where it is not built or not used in this process, or does
// not take these operands.
std::optional<at::Tensor> mm_by_kernel(const tuning::ProductName& name, const at::Tensor& a,
                                       const at::Tensor& b, const std::optional<at::Tensor>& bias);

}  // namespace axonn::ops
