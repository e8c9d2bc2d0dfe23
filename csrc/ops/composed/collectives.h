// Collectives as other ops use them, which have checked the arguments. The group has several ranks,
// which agree on the call first.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/group/group.h"

namespace axonn::ops {

at::Tensor agree_and_all_gather(Group& group, const at::Tensor& shard, int64_t dim);
at::Tensor agree_and_all_reduce(Group& group, const at::Tensor& input, bool maximum);

}  // namespace axonn::ops
