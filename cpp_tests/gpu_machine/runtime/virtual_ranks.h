// Ranks for tests of the real host code, each with its own device of the runtime. They have what
// csrc/ops/cuda gives a rank: a workspace, a pad, pinned state, a copy lane and the order of
// calls.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "core/cuda/fused/call_order.h"
#include "core/cuda/fused/fused_calls.h"
#include "core/cuda/fused/workspace_memory.h"
#include "core/cuda/fused/write_probe.h"
#include "gpu_machine/runtime/matrices.h"
#include "gpu_machine/runtime/runtime.h"
#include "gpu_machine/runtime/slow_gemm.h"

namespace axonn::gpu_machine::testing {

using axonn::cuda::DeviceGuard;
using axonn::cuda::HighPriorityStream;

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

  // `epoch` is the number of calls made before.
  explicit VirtualRanks(int count, uint32_t epoch = 0, double timeout_seconds = 1,
                        const kernels::cuda::GemmBackend& with = slow_backend(),
                        int64_t workspace_bytes = 1)
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
      rank.peers.alone = true;
      rank.peers.limit = {static_cast<uint64_t>(timeout_seconds * 1e9), &rank.pinned.failure(), r};
    }
    grow(workspace_bytes, epoch);
  }

  // Gives all ranks new memory, as Workspace::require does. Frees at once what no graph uses.
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
                               // The flags, followed by the epoch.
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
      peers.host_epoch = epoch;
    }
    // Not by cudaFree, which would wait for all work that still uses it.
    for (void* memory : unused) {
      if (memory != nullptr) {
        Runtime::current().machine.memory().free(reinterpret_cast<uint64_t>(memory));
      }
    }
  }

  // Finds out which flags the streams' queues can write, as a new workspace does.
  void probe_writes() {
    for (int r = 0; r < size(); ++r) {
      const DeviceGuard guard(r);
      write_probes((*this)[r].peers, (*this)[r].compute.get());
    }
    for (int r = 0; r < size(); ++r) {
      const DeviceGuard guard(r);
      const uint32_t arrived = arrived_probes((*this)[r].peers, (*this)[r].compute.get());
      for (int from = 0; from < size(); ++from) {
        if ((arrived >> from & 1) != 0) (*this)[from].peers.queue_writes |= uint32_t{1} << r;
      }
    }
  }

  // Gives the workspaces a multicast address.
  void add_multicast() {
    Memory& memory = Runtime::current().machine.memory();
    std::vector<Region*> team;
    for (int r = 0; r < size(); ++r) {
      team.push_back(memory.find(reinterpret_cast<uint64_t>(ranks[0]->peers.workspaces[r])));
    }
    const uint64_t front = memory.reserve();
    memory.map_team(front, team);
    const uint64_t address = front + kernels::cuda::kFrontBytes;
    for (auto& rank : ranks) rank->peers.multicast = reinterpret_cast<void*>(address);
  }

  int size() const { return static_cast<int>(ranks.size()); }
  Rank& operator[](int rank) { return *ranks[static_cast<size_t>(rank)]; }

  // Enqueues a rank's call on a stream, as Workspace::call does.
  template <typename Enqueue>
  void call(int r, cudaStream_t stream, Enqueue&& enqueue) {
    Rank& rank = (*this)[r];
    kernels::cuda::CallOrder::Turn turn(rank.order, stream);
    rank.memory.enter_call(turn.is_captured(), rank.peers);
    auto streams = rank.copies.behind(stream);
    if (turn.is_captured()) streams.branches = captured_branches;
    enqueue(streams);
    rank.memory.leave_call(rank.peers);
    turn.end();
  }

  // Enqueues this rank's part of all_gather(shards) @ b on a stream.
  void gather(int r, const DeviceMatrix& shard, const DeviceMatrix& b, const DeviceMatrix& output,
              int64_t rows, int64_t k, int64_t n, cudaStream_t stream) {
    Rank& rank = (*this)[r];
    const DeviceGuard guard(r);
    kernels::cuda::FusedGemm gemm = gemm_of(nullptr, b, rows, k, n);
    gemm.d = output.data();
    const comm::ChunkPlan plan{rows, size(), kernels::cuda::chunks_per_shard(rows / size())};
    kernels::cuda::CopyEnginePush push;
    call(r, stream, [&](const kernels::cuda::CallStreams& streams) {
      kernels::cuda::all_gather_gemm(rank.peers, backend, {}, gemm, kernels::cuda::Arriving::kRows,
                                     {shard.data(), k * 2, plan, true}, push, streams);
    });
  }

  // Enqueues this rank's part of the sum of a @ b over ranks: all of it, or only its own rows.
  void sum(int r, const DeviceMatrix& a, const DeviceMatrix& b, const DeviceMatrix& output,
           int64_t m, int64_t k, int64_t n, bool everywhere, cudaStream_t stream) {
    Rank& rank = (*this)[r];
    const DeviceGuard guard(r);
    const kernels::cuda::FusedGemm gemm = gemm_of(a.data(), b, m, k, n);
    call(r, stream, [&](const kernels::cuda::CallStreams& streams) {
      if (everywhere) {
        kernels::cuda::gemm_all_reduce(rank.peers, backend, {}, gemm,
                                       kernels::cuda::SumBroadcast::kCopyEngine, output.data(),
                                       streams);
      } else {
        kernels::cuda::gemm_reduce_scatter(rank.peers, backend, {}, gemm, output.data(), streams);
      }
    });
  }

  // Returns a graph of what `one` and `other` enqueue on two streams of the rank.
  template <typename One, typename Other>
  cudaGraphExec_t capture(int r, One&& one, Other&& other) {
    const DeviceGuard guard(r);
    cudaStream_t stream = (*this)[r].compute.get(), second = (*this)[r].other.get();
    axonn::cuda::Event forked, joined;
    AXONN_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    forked.record(stream);
    forked.block(second);
    one(stream);
    other(second);
    joined.record(second);
    joined.block(stream);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t made = nullptr;
    AXONN_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    AXONN_CUDA_CHECK(cudaGraphInstantiate(&made, graph, 0));
    AXONN_CUDA_CHECK(cudaGraphDestroy(graph));
    return made;
  }

  const kernels::cuda::GemmBackend backend;
  kernels::cuda::Branches captured_branches = kernels::cuda::Branches::kExpected;
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

// Runs all devices until everything has ended.
inline void synchronize_all(int devices) {
  for (int d = 0; d < devices; ++d) {
    const DeviceGuard guard(d);
    AXONN_CUDA_CHECK(cudaDeviceSynchronize());
  }
}

// Expects that a trap has ended the machine, and that rank 1 has reported that it saw `seen` where
// rank 0 should have set `expected`.
inline void expect_wait_in_vain(Runtime& runtime, VirtualRanks& ranks, uint32_t expected,
                                uint32_t seen) {
  ASSERT_TRUE(runtime.failure());
  EXPECT_EQ(static_cast<int>(runtime.failure()->kind()),
            static_cast<int>(MachineError::Kind::kTrap))
      << runtime.failure()->what();
  const kernels::cuda::SpinFailure& failure = ranks[1].pinned.failure();
  EXPECT_EQ(failure.state, kernels::cuda::SpinFailure::kWritten);
  EXPECT_EQ(failure.rank, 1);
  EXPECT_EQ(failure.peer, 0);
  EXPECT_EQ(failure.expected, expected);
  EXPECT_EQ(failure.seen, seen);
}

}  // namespace axonn::gpu_machine::testing
