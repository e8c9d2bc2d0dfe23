// What the host passes to kernels that wait for peers, and what it learns when one waits in vain.
#pragma once

#include <cstdint>

namespace axonn::kernels::cuda {

// The device writes this into pinned host memory, once; the context is lost afterwards.
struct SpinFailure {
  static constexpr uint32_t kNone = 0;
  static constexpr uint32_t kWriting = 1;
  static constexpr uint32_t kWritten = 2;

  uint32_t state = kNone;
  int32_t rank = 0;
  int32_t peer = 0;
  int32_t chunk = 0;
  uint32_t expected = 0;  // epochs
  uint32_t seen = 0;
};

// How long a kernel waits for a flag, and where it writes a record before it gives up.
struct SpinLimit {
  uint64_t budget_ns;
  SpinFailure* failure;  // pinned host memory
  int32_t rank;          // this rank, for the message
};

}  // namespace axonn::kernels::cuda
