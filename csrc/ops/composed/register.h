// Macros with which the file of an op registers it. The same function serves every device; devices
// differ only in ATen and c10d below it.
#pragma once

#include <torch/library.h>

#include "ops/autocast.h"

// The function has the name of the op.
#define AXONN_REGISTER_OP(function)                                   \
  TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl(#function, &function); } \
  TORCH_LIBRARY_IMPL(axonn, CUDA, m) { m.impl(#function, &function); }

// Registers what an op does under autocast; `rule` is a function of autocast.h.
#define AXONN_REGISTER_AUTOCAST(function, rule)                                                \
  TORCH_LIBRARY_IMPL(axonn, AutocastCPU, m) { m.impl(#function, rule(c10::DeviceType::CPU)); } \
  TORCH_LIBRARY_IMPL(axonn, AutocastCUDA, m) { m.impl(#function, rule(c10::DeviceType::CUDA)); }
