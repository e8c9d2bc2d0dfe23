// What a call is: the name under which it is tuned, and what ranks must agree on.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "core/symmetric/symmetric_group.h"

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
  // Tensors whose gradients take collectives. Which of them need one is no matter of what is
  // fastest now, but ranks must agree on it, or their backward passes would not meet.
  Signature& gradients(std::initializer_list<std::pair<const char*, const at::Tensor&>> of);

  // Op, dtypes, sizes and options. Must be equal on all ranks of the group; those that differ get
  // an error.
  const std::string& text() const { return text_; }
  // What ranks compare before they make the call: text(), the algorithm, and the gradients.
  comm::CallSignature call(const char* algorithm) const;
  // What a process keeps a choice under: text(), and the sizes that are this rank's own.
  std::string key() const { return text_ + own_sizes_; }
  // Memory layouts by tensor, and own sizes. Ranks may differ: rank 0's, where the key is first
  // met, are part of what is kept on disk.
  const std::string& layouts() const { return layouts_; }

 private:
  std::string text_;
  std::string own_sizes_;
  std::string layouts_;
  std::string gradients_;  // names
};

}  // namespace axonn::ops
