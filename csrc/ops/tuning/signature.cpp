#include "ops/tuning/signature.h"

#include <ATen/core/grad_mode.h>

#include <charconv>

namespace axonn::ops {
namespace {

const char* dtype_name(c10::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kLong:
      return "int64";
    default:
      return at::toString(type);
  }
}

// A leading dimension longer than a row does not change which algorithm is fastest, so it is
// ignored.
const char* layout_name(const at::Tensor& t) {
  if (t.is_contiguous()) return "rows";
  if (t.dim() != 2) return "strided";
  if (t.stride(1) == 1 && t.stride(0) >= t.size(1)) return "rows";
  if (t.stride(0) == 1 && t.stride(1) >= t.size(0)) return "columns";
  return "strided";
}

// Makes no string for each number, because every call of an op builds its signature.
void append(std::string& text, int64_t value) {
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
  text.append(digits, end);
}

void append_sizes(std::string& text, const at::Tensor& t) {
  text += '[';
  for (int64_t dim = 0; dim < t.dim(); ++dim) {
    if (dim > 0) text += ',';
    append(text, t.size(dim));
  }
  text += ']';
}

}  // namespace

Signature::Signature(const char* op) {
  text_.reserve(160);  // so that a call allocates once
  text_ += op;
}

Signature& Signature::tensor(const char* name, const at::Tensor& t) {
  text_.append(" ").append(name).append("=").append(dtype_name(t.scalar_type()));
  append_sizes(text_, t);
  layouts_.append(layouts_.empty() ? "" : ",").append(layout_name(t));
  return *this;
}

Signature& Signature::own_tensor(const at::Tensor& t) {
  append_sizes(own_sizes_, t);
  layouts_.append(layouts_.empty() ? "" : ",").append(layout_name(t));
  append_sizes(layouts_, t);
  return *this;
}

Signature& Signature::dtype(const at::Tensor& t) {
  text_.append(" ").append(dtype_name(t.scalar_type()));
  return *this;
}

Signature& Signature::device(c10::Device device) {
  if (!device.is_cpu()) text_.append(" device=").append(c10::DeviceTypeName(device.type(), true));
  return *this;
}

Signature& Signature::option(const char* name, int64_t value) {
  text_.append(" ").append(name).append("=");
  append(text_, value);
  return *this;
}

Signature& Signature::gradients(
    std::initializer_list<std::pair<const char*, const at::Tensor&>> of) {
  // This runs below autograd, whose kernels keep the caller's grad mode on.
  if (!at::GradMode::is_enabled()) return *this;
  for (const auto& [name, t] : of) {
    if (t.requires_grad()) gradients_.append(gradients_.empty() ? "" : ",").append(name);
  }
  return *this;
}

comm::CallSignature Signature::call(const char* algorithm) const {
  std::string whole;
  whole.reserve(sizeof(comm::CallSignature));
  whole.append(text_).append(" algorithm=").append(algorithm);
  if (!gradients_.empty()) whole.append(" requires_grad=").append(gradients_);
  return comm::CallSignature::of(whole);
}

}  // namespace axonn::ops
