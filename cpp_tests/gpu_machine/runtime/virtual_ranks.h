// Ranks for tests of the real host code, each with a device of the runtime of its own. They have
// what csrc/ops/cuda gives a rank: a workspace, a pad, pinned state, a lane for copies and the
// order of calls.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "core/cuda/fused/call_order.h"
#include "core/cuda/fused/fused_calls.h"
#include "core/cuda/fused/peer_state.h"
#include "gpu_machine/runtime/matrices.h"
#include "gpu_machine/runtime/runtime.h"
#include "gpu_machine/runtime/slow_gemm.h"

namespace axonn::gpu_machine::testing {

using axonn::cuda::DeviceGuard;
using axonn::cuda::HighPriorityStream;

inline constexpr size_t kWorkspaceBytes = 1 << 16;

class VirtualRanks {
 public:
  struct Rank {
    kernels::cuda::Peers peers;
    kernels::cuda::PinnedState pinned;
    kernels::cuda::CopyLane copies;
    kernels::cuda::CallOrder order;
    HighPriorityStream compute, other;
  };

  // `epoch` is the number of calls that were made before.
  explicit VirtualRanks(int count, uint32_t epoch = 0, double timeout_seconds = 1,
                        const kernels::cuda::GemmBackend& with = slow_backend(),
                        size_t workspace_bytes = kWorkspaceBytes)
      : backend(with) {
    using kernels::cuda::kPadBytes;
    std::vector<void*> pads, workspaces;
    for (int r = 0; r < count; ++r) {
      const DeviceGuard guard(r);
      void* memory = nullptr;
      AXONN_CUDA_CHECK(cudaMalloc(&memory, kPadBytes + kernels::cuda::kStateBytes));
      set_words(memory, (kPadBytes + kernels::cuda::kStateBytes) / 4, 0);
      set_words(memory, kPadBytes / 4 + 1, epoch);  // the flags, and the epoch behind them
      pads.push_back(memory);
      AXONN_CUDA_CHECK(cudaMalloc(&memory, workspace_bytes));
      workspaces.push_back(memory);
    }
    for (int r = 0; r < count; ++r) {
      const DeviceGuard guard(r);
      kernels::cuda::load_kernels(backend);
      auto& rank = *ranks.emplace_back(std::make_unique<Rank>());
      rank.peers.rank = r;
      rank.peers.num_ranks = count;
      for (size_t other = 0; other < pads.size(); ++other) {
        rank.peers.pads[other] = pads[other];
        rank.peers.workspaces[other] = workspaces[other];
      }
      rank.peers.limit = {static_cast<uint64_t>(timeout_seconds * 1e9), &rank.pinned.failure(), r};
      rank.peers.epoch_to_push = rank.pinned.epoch_to_push();
      set_own_pad(rank.peers, pads[static_cast<size_t>(r)]);
    }
  }

  // Gives the workspaces a multicast address.
  void add_multicast() {
    Memory& memory = Runtime::current().machine.memory();
    std::vector<Region*> team;
    for (int r = 0; r < size(); ++r) {
      team.push_back(memory.find(reinterpret_cast<uint64_t>(ranks[0]->peers.workspaces[r])));
    }
    const uint64_t address = memory.reserve();
    memory.map_team(address, team);
    for (auto& rank : ranks) rank->peers.multicast = reinterpret_cast<void*>(address);
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
