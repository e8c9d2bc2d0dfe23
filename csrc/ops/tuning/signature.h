// Describes a call as text: the name under which it is tuned, and what ranks must agree on.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "core/symmetric/symmetric_group.h"

namespace axonn::ops {

// Names a call by everything that decides which algorithm is fastest.
class Signature {
 public:
  explicit Signature(const char* op);
  // Adds the dtype, the sizes, and whether rows or columns are contiguous.
  Signature& tensor(const char* name, const at::Tensor& t);
  Signature& option(const char* name, int64_t value);
  Signature& dtype(const at::Tensor& t);
  // Adds the device of the tensors; nothing is added for the CPU.
  Signature& device(c10::Device device);
  // Adds a tensor whose sizes may differ between ranks.
  Signature& own_tensor(const at::Tensor& t);
  // Adds the tensors whose gradients take collectives. Which of them need a gradient does not
  // change what is fastest now, but ranks must agree on it, or their backward passes would make
  // different collectives.
  Signature& gradients(std::initializer_list<std::pair<const char*, const at::Tensor&>> of);

  // The op, dtypes, sizes and options. They must be equal on all ranks of the group; ranks that
  // differ get an error.
  const std::string& text() const { return text_; }
  // What ranks compare before they make the call: text(), the algorithm, and the gradients that are
  // needed.
  comm::CallSignature call(const char* algorithm) const;
  // The key under which a process keeps a choice: text(), and the sizes that are this rank's own.
  std::string key() const { return text_ + own_sizes_; }
  // The layout of each tensor in memory, and own sizes. Ranks may differ in them. Those of rank 0,
  // at the first call with this key, are part of the name under which a choice is kept on disk.
  const std::string& layouts() const { return layouts_; }

 private:
  std::string text_;
  std::string own_sizes_;
  std::string layouts_;
  std::string gradients_;  // of the tensors that need one
};

}  // namespace axonn::ops
