// The name under which a call is tuned.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace axonn::ops {

// Names a call by what decides which algorithm is fastest.
class Signature {
 public:
  explicit Signature(const char* op);
  // dtype and sizes, and whether rows or columns are contiguous
  Signature& tensor(const char* name, const at::Tensor& t);
  Signature& option(const char* name, int64_t value);
  Signature& dtype(const at::Tensor& t);
  // Where the tensors are; the CPU goes without saying.
  Signature& device(c10::Device device);
  // A tensor whose sizes ranks need not agree on.
  Signature& own_tensor(const at::Tensor& t);

  // Op, dtypes, sizes and options. Must be equal on all ranks of the group; those that differ get
  // an error.
  const std::string& text() const { return text_; }
  // What a process keeps a choice under: text(), and the sizes that are this rank's own.
  std::string key() const { return text_ + own_sizes_; }
  // Memory layouts by tensor, and own sizes. Ranks may differ: rank 0's, where the key is first
  // met, are part of what is kept on disk.
  const std::string& layouts() const { return layouts_; }

 private:
  std::string text_;
  std::string own_sizes_;
  std::string layouts_;
};

}  // namespace axonn::ops
