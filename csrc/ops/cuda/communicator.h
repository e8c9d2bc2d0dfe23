// Binds the NCCL communicators of csrc/core/cuda as Python classes.
#pragma once

#include <pybind11/pybind11.h>

namespace axonn::ops::cuda {

void bind_communicators(pybind11::module_& m);

}  // namespace axonn::ops::cuda
