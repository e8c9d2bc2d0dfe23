// Messages between processes of one host, for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace axonn::ops {

void bind_messages(pybind11::module_& m);

}  // namespace axonn::ops
