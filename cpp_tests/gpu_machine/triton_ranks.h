// Four virtual ranks that run the project's fused Triton kernels against each other.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "gpu_machine/triton_case.h"

namespace axonn::gpu_machine::testing {

inline constexpr int kRanks = 4;            // for which the cases are compiled
inline constexpr int64_t kFlagStride = 32;  // words: FLAG_STRIDE of axonn_ext/triton/schedule.py
inline constexpr int64_t kChunks = 2;       // of a shard
inline constexpr int kCalls = 3;
inline constexpr uint32_t kFirstEpoch = 0xFFFFFFFDu;  // epochs wrap behind the second call
inline constexpr uint32_t kPrograms = 2;
inline constexpr int64_t kBudgetNs = 1'000'000'000;

// The other kernel that a fused op needs, compiled for the same.
inline TritonCase partner(const TritonCase& of, const std::string& kernel) {
  for (const TritonCase& one : testing::triton_cases_of(kernel, of.folder)) {
    if (one.text("architecture") == of.text("architecture") && one.dtype() == of.dtype() &&
        (one.is_true("aligned") == of.is_true("aligned"))) {
      return one;
    }
  }
  throw std::invalid_argument("no " + kernel + " for " + of.name);
}

// What the kernels of four ranks share: signals, epochs and streams, as `Signals` of
// axonn_ext/triton/signals.py has them.
class Ranks {
 public:
  explicit Ranks(uint64_t seed) : machine_(options_of(seed)) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::string name = " of rank " + std::to_string(rank);
      streams_.push_back(machine_.new_stream(rank));
      flags_.push_back(machine_.put(
          std::vector<uint32_t>(kRanks * kChunks * kFlagStride, kFirstEpoch), "flags" + name));
      counters_.push_back(
          machine_.put(std::vector<uint32_t>(kRanks * kChunks, 0), "counters" + name));
      epochs_.push_back(machine_.put(std::vector<uint32_t>{kFirstEpoch}, "epoch" + name));
      failures_.push_back(machine_.put(std::vector<uint32_t>{0}, "failure" + name));
    }
    flags_ptrs_ = machine_.put(flags_, "addresses of flags");
  }

  Machine& machine() { return machine_; }
  uint32_t failure(int rank) { return machine_.get<uint32_t>(failures_[at(rank)], 1)[0]; }

  // The arguments of every kernel of this rank.
  TritonArguments arguments(int rank, int64_t chunk_tile, int64_t rows, int64_t budget) const {
    TritonArguments made;
    made.set("flags_ptrs", flags_ptrs_);
    made.set("flags_ptr", flags_[at(rank)]);
    made.set("counters_ptr", counters_[at(rank)]);
    made.set("epoch_ptr", epochs_[at(rank)]);
    made.set("failure_ptr", failures_[at(rank)]);
    made.set("budget", budget);
    made.set("rows", rows);
    made.set("rank", int64_t{rank});
    made.set("chunks", kChunks);
    made.set("chunk_tile", chunk_tile);
    return made;
  }

  // Signals.advance().
  void advance(int rank, int call) {
    const uint64_t next =
        machine_.put(std::vector<uint32_t>{kFirstEpoch + 1 + static_cast<uint32_t>(call)}, "epoch");
    machine_.copy(streams_[at(rank)], epochs_[at(rank)], next, 4);
  }
  void launch(int rank, const TritonCase& what, const TritonArguments& arguments,
              uint32_t programs = kPrograms) {
    testing::launch_triton(machine_, streams_[at(rank)], what, arguments, programs);
  }
  void copy(int rank, uint64_t to, uint64_t from, uint64_t bytes) {
    machine_.copy(streams_[at(rank)], to, from, bytes);
  }

 private:
  static size_t at(int rank) { return static_cast<size_t>(rank); }
  static Options options_of(uint64_t seed) {
    Options options;
    options.seed = seed;
    return options;
  }

  Machine machine_;
  std::vector<int> streams_;
  std::vector<uint64_t> flags_, counters_, epochs_, failures_;
  uint64_t flags_ptrs_ = 0;
};

inline void expect_near(double got, const Expected& expected, DataType dtype, int& wrong,
                        const std::string& where) {
  const double bound = expected.bound +
                       testing::step_of(dtype) * (std::abs(expected.value) + expected.bound) +
                       (dtype == DataType::kFloat16 ? 0x1p-25 : 0);
  if (std::abs(got - expected.value) <= bound) return;
  if (++wrong < 5) {
    ADD_FAILURE() << where << ": " << got << ", expected " << expected.value << " up to " << bound;
  }
}

inline uint64_t bytes_of(const TritonCase& what, int64_t count) {
  return static_cast<uint64_t>(count * kernels::size_of(what.dtype()));
}

inline Matrix drawn_b(Machine& machine, const TritonCase& what, int64_t k, int64_t n,
                      std::mt19937_64& random) {
  Matrix b = testing::draw_matrix(k, n, what.dtype(), random);
  if (what.text("layout")[1] == 'T') {
    b.row_stride = 1;
    b.column_stride = k;
  }
  testing::place_matrix(machine, b, "b");
  return b;
}

inline void set_b(TritonArguments& arguments, const TritonCase& what, const Matrix& b) {
  arguments.set_matrix(what, "b", b);
  arguments.set("stride_bk", b.row_stride);
  arguments.set("stride_bn", b.column_stride);
}

}  // namespace axonn::gpu_machine::testing
