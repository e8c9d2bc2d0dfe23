// Translates the core's types to NCCL's, and NCCL's return codes into exceptions.
#pragma once

#include <nccl.h>

#include <string>

#include "core/numeric/data_type.h"
#include "core/ranks/errors.h"

namespace axonn::comm {

[[noreturn]] inline void throw_nccl(ncclResult_t result, const std::string& what, const char* file,
                                    int line) {
  throw CommunicationError(what + " failed: " + ncclGetErrorString(result) + " (" +
                           std::to_string(static_cast<int>(result)) + "); " +
                           ncclGetLastError(nullptr) + " (" + file + ":" + std::to_string(line) +
                           ")");
}

inline ncclDataType_t nccl_type(kernels::DataType dtype) {
  switch (dtype) {
    case kernels::DataType::kFloat32:
      return ncclFloat32;
    case kernels::DataType::kFloat64:
      return ncclFloat64;
    case kernels::DataType::kBFloat16:
      return ncclBfloat16;
    case kernels::DataType::kFloat16:
      return ncclFloat16;
    case kernels::DataType::kInt64:
      return ncclInt64;
  }
  throw std::invalid_argument("NCCL knows no such dtype");
}

}  // namespace axonn::comm

#define AXONN_NCCL_CHECK(expression)                                            \
  do {                                                                          \
    const ncclResult_t axonn_result = (expression);                             \
    if (axonn_result != ncclSuccess) {                                          \
      ::axonn::comm::throw_nccl(axonn_result, #expression, __FILE__, __LINE__); \
    }                                                                           \
  } while (false)
