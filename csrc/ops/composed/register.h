// Macros that register an op. The same function serves every device; devices differ only in the
// ATen and c10d code below it.
#pragma once

#include <torch/library.h>

#include "ops/autocast.h"

// Registers a function as the op of the same name.
#define AXONN_REGISTER_OP(function)                                   \
  TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl(#function, &function); } \
  TORCH_LIBRARY_IMPL(axonn, CUDA, m) { m.impl(#function, &function); }

// Registers how an op behaves under autocast; `rule` is a function from autocast.h.
#define AXONN_REGISTER_AUTOCAST(function, rule)                                                \
  TORCH_LIBRARY_IMPL(axonn, AutocastCPU, m) { m.impl(#function, rule(c10::DeviceType::CPU)); } \
  TORCH_LIBRARY_IMPL(axonn, AutocastCUDA, m) { m.impl(#function, rule(c10::DeviceType::CUDA)); }
