// The Python module axonn_ext._C. Importing it registers the ops with torch.library; what it holds
// itself is the few functions that are no ops.
#include <pybind11/pybind11.h>

#include "ops/group.h"

PYBIND11_MODULE(_C, m) {
  m.def(
      "configure",
      [](double timeout_seconds, int64_t symmetric_memory_bytes) {
        axonn::ops::configure_groups({timeout_seconds, symmetric_memory_bytes});
      },
      pybind11::kw_only(), pybind11::arg("timeout_seconds"),
      pybind11::arg("symmetric_memory_bytes"));
  m.def("symmetric_memory_bytes_in_use", &axonn::ops::symmetric_memory_bytes_in_use,
        pybind11::call_guard<pybind11::gil_scoped_release>(),
        "Bytes of symmetric memory that this rank has used in all of its groups.");
}
