// Ranks for tests of the real host code, each with a device of the runtime of its own. They have
// what csrc/ops/cuda gives a rank: a workspace, a pad, pinned state, a lane for copies and the
// order of calls.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/cuda/fused/call_order.h"
#include "core/cuda/fused/fused_calls.h"
#include "core/cuda/fused/workspace_memory.h"
#include "gpu_machine/runtime/runtime.h"
#include "gpu_machine/runtime/slow_gemm.h"

namespace axonn::gpu_machine::testing {

using axonn::cuda::CudaError;
using axonn::cuda::DeviceGuard;
using axonn::cuda::HighPriorityStream;

// A matrix of small integers, which bfloat16 holds and whose sums of products fp32 holds exactly.
struct Matrix {
  int64_t rows, columns;
  std::vector<float> values;

  static Matrix random(int64_t rows, int64_t columns, std::mt19937_64& random) {
    Matrix m{rows, columns, std::vector<float>(static_cast<size_t>(rows * columns))};
    for (float& value : m.values) value = static_cast<float>(random() % 5) - 2;
    return m;
  }
  float at(int64_t row, int64_t column) const {
    return values[static_cast<size_t>(row * columns + column)];
  }
  Matrix row_range(int64_t begin, int64_t end) const {
    return {end - begin, columns,
            std::vector<float>(values.begin() + begin * columns, values.begin() + end * columns)};
  }
  friend Matrix operator*(const Matrix& a, const Matrix& b) {
    Matrix c{a.rows, b.columns, std::vector<float>(static_cast<size_t>(a.rows * b.columns))};
    for (int64_t i = 0; i < a.rows; ++i) {
      for (int64_t j = 0; j < b.columns; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < a.columns; ++k) sum += double{a.at(i, k)} * double{b.at(k, j)};
        c.values[static_cast<size_t>(i * b.columns + j)] = static_cast<float>(sum);
      }
    }
    return c;
  }
  friend Matrix operator+(Matrix a, const Matrix& b) {
    for (size_t i = 0; i < a.values.size(); ++i) a.values[i] += b.values[i];
    return a;
  }
  friend bool operator==(const Matrix&, const Matrix&) = default;
};

// A matrix in bfloat16 on the current device. It is freed with the runtime.
class DeviceMatrix {
 public:
  DeviceMatrix(int64_t rows, int64_t columns) : rows_(rows), columns_(columns) {
    AXONN_CUDA_CHECK(cudaMalloc(&data_, static_cast<size_t>(rows * columns) * sizeof(uint16_t)));
  }
  explicit DeviceMatrix(const Matrix& from) : DeviceMatrix(from.rows, from.columns) {
    std::vector<uint16_t> narrow(from.values.size());
    for (size_t i = 0; i < narrow.size(); ++i) {  // exact, for the lower half is zeros
      uint32_t bits = 0;
      std::memcpy(&bits, &from.values[i], sizeof bits);
      narrow[i] = static_cast<uint16_t>(bits >> 16);
    }
    AXONN_CUDA_CHECK(cudaMemcpy(data_, narrow.data(), 2 * narrow.size(), cudaMemcpyHostToDevice));
  }
  void* data() const { return data_; }
  // Throws CudaError if something ended the machine.
  Matrix read() const {
    std::vector<uint16_t> narrow(static_cast<size_t>(rows_ * columns_));
    AXONN_CUDA_CHECK(cudaMemcpy(narrow.data(), data_, 2 * narrow.size(), cudaMemcpyDeviceToHost));
    Matrix m{rows_, columns_, std::vector<float>(narrow.size())};
    for (size_t i = 0; i < narrow.size(); ++i) {
      const uint32_t bits = uint32_t{narrow[i]} << 16;
      std::memcpy(&m.values[i], &bits, sizeof bits);
    }
    return m;
  }

 private:
  int64_t rows_, columns_;
  void* data_ = nullptr;
};

class VirtualRanks {
 public:
  struct Rank {
    kernels::cuda::Peers peers;
    kernels::cuda::PinnedState pinned;
    kernels::cuda::CopyLane copies;
    kernels::cuda::CallOrder order;
    kernels::cuda::WorkspaceMemory memory{1 << 18};  // small, to be quick
    HighPriorityStream compute, other;
  };

  // `epoch` is the number of calls that were made before.
  explicit VirtualRanks(int count, uint32_t epoch = 0, double timeout_seconds = 1,
                        const kernels::cuda::GemmBackend& with = slow_backend())
      : backend(with) {
    for (int r = 0; r < count; ++r) {
      const DeviceGuard guard(r);
      for (int other = 0; other < count; ++other) {
        if (other != r) AXONN_CUDA_CHECK(cudaDeviceEnablePeerAccess(other, 0));
      }
      kernels::cuda::load_kernels(backend);
      auto& rank = *ranks.emplace_back(std::make_unique<Rank>());
      rank.peers.rank = r;
      rank.peers.num_ranks = count;
      rank.peers.limit = {static_cast<uint64_t>(timeout_seconds * 1e9), &rank.pinned.failure(), r};
    }
    grow(1, epoch);
  }

  // Gives all ranks other memory, as Workspace::require does. What no graph uses is freed at once.
  void grow(int64_t bytes, uint32_t epoch = 0) {
    using kernels::cuda::kPadBytes;
    std::vector<void*> fronts, unused;
    for (int r = 0; r < size(); ++r) {
      const DeviceGuard guard(r);
      (*this)[r].memory.grow(bytes, (*this)[r].order, (*this)[r].pinned, (*this)[r].peers,
                             [&](int64_t all_bytes, bool keep) {
                               void* front = nullptr;
                               AXONN_CUDA_CHECK(cudaMalloc(&front, static_cast<size_t>(all_bytes)));
                               set_words(front, kernels::cuda::kFrontBytes / 4, 0);
                               // The flags, and the epoch behind them.
                               set_words(front, kPadBytes / 4 + 1, epoch);
                               fronts.push_back(front);
                               if (!keep) unused.push_back((*this)[r].peers.pads[r]);
                             });
    }
    for (int r = 0; r < size(); ++r) {
      kernels::cuda::Peers& peers = (*this)[r].peers;
      for (size_t other = 0; other < fronts.size(); ++other) {
        peers.pads[other] = fronts[other];
        peers.workspaces[other] = static_cast<char*>(fronts[other]) + kernels::cuda::kFrontBytes;
      }
      set_own_pad(peers, fronts[static_cast<size_t>(r)]);
    }
    // Not by cudaFree, which would wait for what still uses it.
    for (void* memory : unused) {
      if (memory != nullptr) {
        Runtime::current().machine.memory().free(reinterpret_cast<uint64_t>(memory));
      }
    }
  }

  int size() const { return static_cast<int>(ranks.size()); }
  Rank& operator[](int rank) { return *ranks[static_cast<size_t>(rank)]; }

  // Enqueues this rank's part of all_gather(shards) @ b on a stream, as Workspace::call does.
  void gather(int r, const DeviceMatrix& shard, const DeviceMatrix& b, const DeviceMatrix& output,
              int64_t rows, int64_t k, int64_t n, cudaStream_t stream) {
    Rank& rank = (*this)[r];
    const DeviceGuard guard(r);
    kernels::cuda::FusedGemm gemm = gemm_of(nullptr, b, rows, k, n);
    gemm.d = output.data();
    const comm::ChunkPlan plan{rows, size(), kernels::cuda::chunks_per_shard(rows / size())};
    kernels::cuda::CallOrder::Turn turn(rank.order, stream);
    rank.memory.note_call(turn.is_captured());
    kernels::cuda::CopyEnginePush push;
    kernels::cuda::all_gather_gemm(rank.peers, backend, {}, gemm, kernels::cuda::Arriving::kRows,
                                   {shard.data(), k * 2, plan, true}, push,
                                   rank.copies.behind(stream));
    turn.end();
  }

  // Enqueues this rank's part of the sum of a @ b over ranks: all of it, or only its own rows.
  void sum(int r, const DeviceMatrix& a, const DeviceMatrix& b, const DeviceMatrix& output,
           int64_t m, int64_t k, int64_t n, bool everywhere, cudaStream_t stream) {
    Rank& rank = (*this)[r];
    const DeviceGuard guard(r);
    const kernels::cuda::FusedGemm gemm = gemm_of(a.data(), b, m, k, n);
    kernels::cuda::CallOrder::Turn turn(rank.order, stream);
    rank.memory.note_call(turn.is_captured());
    const auto streams = rank.copies.behind(stream);
    if (everywhere) {
      kernels::cuda::gemm_all_reduce(rank.peers, backend, {}, gemm,
                                     kernels::cuda::SumBroadcast::kCopyEngine, output.data(),
                                     streams);
    } else {
      kernels::cuda::gemm_reduce_scatter(rank.peers, backend, {}, gemm, output.data(), streams);
    }
    turn.end();
  }

  const kernels::cuda::GemmBackend backend;
  std::vector<std::unique_ptr<Rank>> ranks;

 private:
  static void set_words(void* memory, int64_t count, uint32_t value) {
    const std::vector<uint32_t> words(static_cast<size_t>(count), value);
    AXONN_CUDA_CHECK(cudaMemcpy(memory, words.data(), 4 * words.size(), cudaMemcpyHostToDevice));
  }
  static kernels::cuda::FusedGemm gemm_of(const void* a, const DeviceMatrix& b, int64_t m,
                                          int64_t k, int64_t n) {
    kernels::cuda::FusedGemm gemm{};
    gemm.a = a;
    gemm.b = b.data();
    gemm.m = m;
    gemm.n = n;
    gemm.k = k;
    gemm.lda = k;
    gemm.ldb = n;
    gemm.ldd = n;
    gemm.dtype = kernels::DataType::kBFloat16;
    return gemm;
  }
};

// Runs all devices until all is over.
inline void synchronize_all(int devices) {
  for (int d = 0; d < devices; ++d) {
    const DeviceGuard guard(d);
    AXONN_CUDA_CHECK(cudaDeviceSynchronize());
  }
}

}  // namespace axonn::gpu_machine::testing
