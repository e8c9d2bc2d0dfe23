// Parameters of kernels that wait for peers, and the record that they leave when a wait fails.
#pragma once

#include <cstdint>

namespace axonn::kernels::cuda {

// The device writes this to pinned host memory, once; the context is lost afterwards.
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
  bool own_rows_stay = false;  // this rank's rows have not left either (SpinLimit::own_rows_left)
};

// How long a kernel waits for a flag, and where it writes a record before it gives up.
struct SpinLimit {
  uint64_t budget_ns;
  SpinFailure* failure;  // pinned host memory
  int32_t rank;          // this rank, for the message
  // This rank's flag for "own rows have left", set only if the order of a graph's branches is all
  // that can delay them: copies to peers take milliseconds (a guess). Rows that have not left after
  // own_rows_ns are queued behind the waiting kernel, which then gives up.
  const uint32_t* own_rows_left = nullptr;
  uint64_t own_rows_ns = 10'000'000'000;
};

}  // namespace axonn::kernels::cuda
