// Collectives for other ops, which have checked the arguments already. The group has several ranks,
// and they agree on the call first.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/group/group.h"

namespace axonn::ops {

at::Tensor agree_and_all_gather(Group& group, const at::Tensor& shard, int64_t dim);
at::Tensor agree_and_all_reduce(Group& group, const at::Tensor& input, bool maximum);

}  // namespace axonn::ops
