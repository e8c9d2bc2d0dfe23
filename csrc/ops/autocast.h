// What the ops do under autocast. A matmul takes its operands in autocast's dtype, as torch's own
// do: so also what crosses ranks, and the gradients until they come to what was cast. Operands are
// cast above the ops, once, since below some algorithms call torch's matmul and others do not.
// Collectives alone keep the dtype that they get, and register nothing.
#pragma once

#include <c10/core/DeviceType.h>
#include <torch/library.h>

namespace axonn::ops {

// Casts every tensor argument to autocast's dtype on that kind of device. The op raises TypeError
// for a dtype that matmuls are not made in.
torch::CppFunction casts_operands(c10::DeviceType device);

// Casts nothing: the operands of a backward pass have the dtype that forward gave them.
torch::CppFunction leaves_operands(c10::DeviceType device);

}  // namespace axonn::ops
