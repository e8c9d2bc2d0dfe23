// Binds the orchestrator of csrc/core for axonn_ext.overlap.
#pragma once

#include <pybind11/pybind11.h>

namespace axonn::ops {

void bind_orchestrator(pybind11::module_& m);

}  // namespace axonn::ops
