// How the ops behave under autocast. A matmul casts its operands to autocast's dtype, as torch's
// own matmul does. So the data that crosses ranks has that dtype too, and so do the gradients until
// they reach the tensor that was cast. Operands are cast once, above the ops, because below them
// some algorithms call torch's matmul and others do not. Ops that are only a collective keep the
// dtype of their input and register nothing.
#pragma once

#include <c10/core/DeviceType.h>
#include <torch/library.h>

namespace axonn::ops {

// Casts every tensor argument to autocast's dtype for that device type. The op itself raises
// TypeError for a dtype that it does not support.
torch::CppFunction casts_operands(c10::DeviceType device);

// Casts nothing: the operands of a backward pass already have the dtype that forward gave them.
torch::CppFunction leaves_operands(c10::DeviceType device);

}  // namespace axonn::ops
