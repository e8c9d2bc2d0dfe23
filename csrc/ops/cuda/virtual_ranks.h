// Several ranks in one process, to check and time the fused calls on a single GPU.
#pragma once

#include <pybind11/pybind11.h>

namespace axonn::ops::cuda {

void bind_virtual_ranks(pybind11::module_& m);

// Binds the plain product, and a product whose rows arrive over PCIe.
void bind_emulated_link(pybind11::module_& m);

}  // namespace axonn::ops::cuda
