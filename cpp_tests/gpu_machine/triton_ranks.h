// Four virtual ranks that run the project's fused Triton kernels, and what the host code of
// csrc/core/cuda/fused passes to them.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/cuda/fused/flags.h"
#include "core/symmetric/signal_layout.h"
#include "gpu_machine/triton_case.h"

namespace axonn::gpu_machine::testing {

inline constexpr int kRanks = 4;       // the cases are compiled for this number
inline constexpr int64_t kChunks = 2;  // per shard
inline constexpr int kCalls = 3;
inline constexpr uint32_t kFirstEpoch = 0xFFFFFFFDu;  // epochs wrap after the second call
inline constexpr uint32_t kPrograms = 2;
inline constexpr int64_t kBudgetNs = 1'000'000'000;

// Flags, epochs, counters and records of four ranks, each with one stream for its kernels and one
// for its copy engine. Every call ends before the next one begins.
class Ranks {
 public:
  explicit Ranks(uint64_t seed) : machine_(options_of(seed)) {
    const auto num_words = static_cast<size_t>(kRanks * kChunks * comm::kSignalStride / 4);
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::string name = " of rank " + std::to_string(rank);
      streams_.push_back(machine_.new_stream(rank));
      copies_.push_back(machine_.new_stream(rank));
      pads_.push_back(machine_.put(std::vector<uint32_t>(num_words, kFirstEpoch), "flags" + name));
      counters_.push_back(
          machine_.put(std::vector<uint32_t>(kRanks * kChunks, 0), "counters" + name));
      epochs_.push_back(machine_.put(std::vector<uint32_t>{kFirstEpoch}, "epoch" + name));
      records_.push_back(machine_.put(std::vector<kernels::cuda::SpinFailure>(1), "record" + name));
    }
  }

  static uint32_t epoch_of(int call) { return kFirstEpoch + 1 + static_cast<uint32_t>(call); }

  Machine& machine() { return machine_; }
  int stream(int rank) const { return streams_[at(rank)]; }
  uint64_t pad(int rank) const { return pads_[at(rank)]; }
  kernels::cuda::SpinFailure record(int rank) {
    return machine_.get<kernels::cuda::SpinFailure>(records_[at(rank)], 1)[0];
  }
  std::vector<uint32_t> counters(int rank) {
    return machine_.get<uint32_t>(counters_[at(rank)], kRanks * kChunks);
  }

  // Arguments common to all kernels of this rank.
  TritonArguments arguments(int rank, int64_t rows) const {
    TritonArguments made;
    made.set("counters", counters_[at(rank)]);
    made.set("epoch_at", epochs_[at(rank)]);
    made.set("failure", records_[at(rank)]);
    made.set("pad", pads_[at(rank)]);
    for (int other = 0; other < 8; ++other) {
      made.set("pad" + std::to_string(other), pads_[at(other < kRanks ? other : 0)]);
    }
    made.set("rows", rows);
    made.set("rank", int64_t{rank});
    made.set("chunks", kChunks);
    return made;
  }

  // Sets the call's epoch, ahead of its kernels and copies.
  void begin(int rank, int call) {
    epoch_ = machine_.put(std::vector<uint32_t>{epoch_of(call)}, "epoch");
    machine_.copy(stream(rank), epochs_[at(rank)], epoch_, 4);
  }
  // Copies a chunk to a peer by copy engine, or to the rank itself, and raises its flag.
  void bring(int from, int to, int64_t chunk, uint64_t target, uint64_t source, uint64_t bytes) {
    const int by = from == to ? stream(from) : copies_[at(from)];
    if (bytes > 0) machine_.copy(by, target, source, bytes);
    const int64_t flag = from * kChunks + chunk;
    machine_.copy(by, pad(to) + static_cast<uint64_t>(comm::signal_offset_bytes(flag)), epoch_, 4);
  }
  void launch(int rank, const TritonCase& what, const TritonArguments& arguments) {
    testing::launch_triton(machine_, stream(rank), what, arguments, kPrograms);
  }

 private:
  static size_t at(int rank) { return static_cast<size_t>(rank); }
  static Options options_of(uint64_t seed) {
    Options options;
    options.seed = seed;
    return options;
  }

  Machine machine_;
  std::vector<int> streams_, copies_;
  std::vector<uint64_t> pads_, counters_, epochs_, records_;
  uint64_t epoch_ = 0;  // address of the call's epoch, for copy engines
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

// Draws a matrix stored by rows (N) or columns (T), as the case says for operand 0 or 1.
inline Matrix drawn(const TritonCase& what, size_t operand, int64_t rows, int64_t columns,
                    std::mt19937_64& random) {
  Matrix made = testing::draw_matrix(rows, columns, what.dtype(), random);
  if (what.text("layout")[operand] == 'T') {
    made.row_stride = 1;
    made.column_stride = rows;
  }
  return made;
}

inline void set_operand(TritonArguments& arguments, const TritonCase& what, const std::string& name,
                        const Matrix& matrix) {
  testing::set_matrix(arguments, what, name, matrix);
  arguments.set(name == "a" ? "stride_am" : "stride_bk", matrix.row_stride);
  arguments.set(name == "a" ? "stride_ak" : "stride_bn", matrix.column_stride);
}

}  // namespace axonn::gpu_machine::testing
