// How the file of an op registers it. The same function serves every device: what differs between
// them is below, in ATen and c10d.
#pragma once

#include <torch/library.h>

#include "ops/autocast.h"

// The name of the function is the op's.
#define AXONN_REGISTER_OP(function)                                   \
  TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl(#function, &function); } \
  TORCH_LIBRARY_IMPL(axonn, CUDA, m) { m.impl(#function, &function); }

// What an op does under autocast: a function of autocast.h.
#define AXONN_REGISTER_AUTOCAST(function, rule)                                                \
  TORCH_LIBRARY_IMPL(axonn, AutocastCPU, m) { m.impl(#function, rule(c10::DeviceType::CPU)); } \
  TORCH_LIBRARY_IMPL(axonn, AutocastCUDA, m) { m.impl(#function, rule(c10::DeviceType::CUDA)); }
