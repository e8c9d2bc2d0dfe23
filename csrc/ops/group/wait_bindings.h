// Lets Python see what this process waits for, and note waits of its own.
#pragma once

#include <pybind11/pybind11.h>

namespace axonn::ops {

void bind_waits(pybind11::module_& m);

}  // namespace axonn::ops
