// The Python module axonn_ext._cuda. Importing it registers the CUDA kernels with torch.library and
// needs no driver.
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pybind11/pybind11.h>

#include <exception>
#include <string>

#include "core/gemm/launch_config.h"
#include "ops/cuda/call_fused.h"
#include "ops/cuda/communicator.h"
#include "ops/cuda/gemm_backend.h"
#include "ops/cuda/virtual_ranks.h"

namespace {

#define AXONN_STRING_OF(...) #__VA_ARGS__
#define AXONN_STRING(...) AXONN_STRING_OF(__VA_ARGS__)

std::string dotted(int major, int minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

// Returns how this module was built, and which version of NCCL is loaded.
pybind11::dict build_info() {
  int nccl = 0;
  const bool known = ncclGetVersion(&nccl) == ncclSuccess;
  pybind11::dict info;
  info["architectures"] = AXONN_STRING(AXONN_CUDA_ARCHITECTURES);
  info["nvcc"] = AXONN_STRING(AXONN_NVCC_VERSION);
  info["cuda"] = dotted(CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  info["nccl_built"] = dotted(NCCL_MAJOR, NCCL_MINOR) + "." + std::to_string(NCCL_PATCH);
  info["nccl"] = known ? dotted(nccl / 10000, nccl / 100 % 100) + "." + std::to_string(nccl % 100)
                       : std::string();
  return info;
}

// Returns the tiles that GEMMs for sm_90 choose from: block, cluster, stages.
pybind11::list gemm_candidates_sm90() {
  pybind11::list result;
  for (const auto& config :
       axonn::kernels::candidates(axonn::kernels::kSm90, /*element_bytes=*/2)) {
    result.append(pybind11::make_tuple(
        pybind11::make_tuple(config.block_m, config.block_n, config.block_k),
        pybind11::make_tuple(config.cluster_m, config.cluster_n), config.num_stages));
  }
  return result;
}

// Turns an error about an argument into the Python exception that the ops raise for it.
void translate(std::exception_ptr error) {
  if (!error) return;
  try {
    std::rethrow_exception(error);
  } catch (const c10::ValueError& e) {
    PyErr_SetString(PyExc_ValueError, e.what_without_backtrace());
  } catch (const c10::TypeError& e) {
    PyErr_SetString(PyExc_TypeError, e.what_without_backtrace());
  } catch (const c10::NotImplementedError& e) {
    PyErr_SetString(PyExc_NotImplementedError, e.what_without_backtrace());
  } catch (const c10::Error& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what_without_backtrace());
  }
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  pybind11::register_local_exception_translator(&translate);
  m.def("build_info", &build_info);
  m.def("gemm_candidates_sm90", &gemm_candidates_sm90);
  m.def("gemm_source", [](int64_t device) {
    const c10::Device cuda(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
    return axonn::kernels::name_of(axonn::ops::cuda::gemm_source(cuda));
  });
  m.def("release_workspaces", &axonn::ops::cuda::release_workspaces,
        pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("symmetric_workspace_bytes", &axonn::ops::cuda::symmetric_workspace_bytes);
  axonn::ops::cuda::bind_communicators(m);
  axonn::ops::cuda::bind_virtual_ranks(m);
  axonn::ops::cuda::bind_emulated_link(m);
}
