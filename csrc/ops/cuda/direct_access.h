// Checks whether GPUs reach each other's memory. It needs no CUDA, so tests run it without a GPU.
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

namespace axonn::ops::cuda {

// Returns whether all ranks map each other's memory. Raises NotImplementedError for kinds of
// symmetric memory that cannot tell; torch throws "NYI" there, which would be a RuntimeError.
inline bool reaches_all_peers(const char* op, const std::string& group_name,
                              c10d::symmetric_memory::SymmetricMemory& handle) {
  try {
    return handle.world_within_direct_access();
  } catch (const c10::Error& error) {
    C10_THROW_ERROR(
        NotImplementedError,
        c10::str(op, ": algorithm='fused' needs GPUs that reach each other's memory, and torch's ",
                 "symmetric memory of group '", group_name, "' does not tell whether they do: ",
                 error.what_without_backtrace(), "; use 'auto', 'chunked' or 'sequential'"));
  }
}

}  // namespace axonn::ops::cuda
