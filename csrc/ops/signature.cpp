#include "ops/signature.h"

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

// A leading dimension longer than a row does not change which algorithm is fastest.
const char* layout_name(const at::Tensor& t) {
  if (t.is_contiguous()) return "rows";
  if (t.dim() != 2) return "strided";
  if (t.stride(1) == 1 && t.stride(0) >= t.size(1)) return "rows";
  if (t.stride(0) == 1 && t.stride(1) >= t.size(0)) return "columns";
  return "strided";
}

std::string sizes_of(const at::Tensor& t) {
  std::string text = "[";
  for (int64_t dim = 0; dim < t.dim(); ++dim) {
    if (dim > 0) text += ',';
    text += std::to_string(t.size(dim));
  }
  return text + ']';
}

}  // namespace

Signature::Signature(const char* op) {
  text_.reserve(160);  // one allocation a call
  text_ += op;
}

Signature& Signature::tensor(const char* name, const at::Tensor& t) {
  text_.append(" ").append(name).append("=").append(dtype_name(t.scalar_type()));
  text_ += sizes_of(t);
  layouts_.append(layouts_.empty() ? "" : ",").append(layout_name(t));
  return *this;
}

Signature& Signature::own_tensor(const at::Tensor& t) {
  const auto sizes = sizes_of(t);
  own_sizes_ += sizes;
  layouts_.append(layouts_.empty() ? "" : ",").append(layout_name(t)).append(sizes);
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
  text_.append(" ").append(name).append("=").append(std::to_string(value));
  return *this;
}

}  // namespace axonn::ops
