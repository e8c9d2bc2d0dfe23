#include <algorithm>
#include <cstdint>

#include "core/cuda/fused/flags.cuh"
#include "core/cuda/sm90/multicast.cuh"
#include "core/cuda/sm90/switch_sum.h"

namespace axonn::kernels::sm90 {
namespace {

using cuda::kMaxChunks;
using cuda::kMaxPeers;
using cuda::kStoreBytes;
using cuda::Peers;
using cuda::SwitchSum;

constexpr int kWarp = 32;
constexpr int kSumThreads = 256;
constexpr int kCopyThreads = 256;
constexpr int kThreads = kSumThreads + kCopyThreads + kWarp;  // the last warp relays
constexpr int kSumBarrier = 1, kCopyBarrier = 2;              // of 16 in hardware; 0: __syncthreads
// Vectors in flight per thread: 16 SMs with 256 threads then have 512 KiB in flight, about what a
// link of 309 GB/s carries in 2 us. A guess.
constexpr int kInFlight = 8;
static_assert(kMaxPeers <= kWarp, "a lane for each");
static_assert(3 * kMaxPeers * kMaxChunks <= cuda::kDoneFlags);

__device__ int64_t part_begin(const SwitchSum& sum, int part) {
  return part == 0 ? 0 : sum.part_end[part - 1];
}

__device__ comm::SignalLayout layout_of(const Peers& peers, const SwitchSum& sum) {
  return {cuda::kNumSwitchPhases, peers.num_ranks, sum.num_parts};
}

template <int kBarrier, int kMeeting>
__device__ void sync_threads() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kMeeting) : "memory");
}

// Waits, with one lane per rank, until all ranks have announced a part of a phase.
__device__ void await_part(const Peers& peers, const SwitchSum& sum, int phase, int part, int lane,
                           const cuda::SpinLimit& limit) {
  if (lane >= peers.num_ranks) return;
  const int64_t flag = layout_of(peers, sum).flag(phase, {lane, part});
  const int ordinal = lane * sum.num_parts + part;
  cuda::await_flag(cuda::flag_at(peers.pads[peers.rank], flag), *peers.epoch, limit,
                   {sum.num_parts, ordinal});
  // The data was written through one address and is read through the other: addends were written
  // through their rank's own address, sums through the multicast address.
  cuda::fence_aliases();
}

// Announces a part of a phase, with one lane per rank. Pairs with await_part.
__device__ void raise_part(const Peers& peers, const SwitchSum& sum, int phase, int part,
                           int lane) {
  if (lane >= peers.num_ranks) return;
  cuda::fence_aliases();
  const int64_t flag = layout_of(peers, sum).flag(phase, {peers.rank, part});
  cuda::store_release(cuda::flag_at(peers.pads[lane], flag), *peers.epoch);
}

// Tells all ranks about each part that this rank's GEMM has announced locally.
__device__ void relay(const Peers& peers, const SwitchSum& sum, int lane) {
  if (lane >= peers.num_ranks) return;
  for (int part = 0; part < sum.num_parts; ++part) {
    const int64_t flag = layout_of(peers, sum).flag(cuda::kMultiplied, {0, part});
    cuda::await_flag(cuda::flag_at(peers.pads[peers.rank], flag), *peers.epoch, peers.limit,
                     {sum.num_parts, peers.rank * sum.num_parts + part});
    raise_part(peers, sum, cuda::kAddends, part, lane);
  }
}

// Moves a CTA's share of the vectors. Each thread keeps several of them in flight.
template <int kMoving, typename Load, typename Store>
__device__ void move(comm::Range range, int thread, Load&& load, Store&& store) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kMoving;
  for (int64_t i = range.begin + static_cast<int64_t>(blockIdx.x) * kMoving + thread; i < range.end;
       i += kInFlight * step) {
    uint4 bits[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (i + u * step < range.end) bits[u] = load(i + u * step);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (i + u * step < range.end) store(i + u * step, bits[u]);
    }
  }
}

// Sums this rank's share of a part, and stores the sums at all ranks.
template <typename T>
__device__ void add_part(const Peers& peers, const SwitchSum& sum, int part, int thread) {
  const int64_t begin = part_begin(sum, part);
  const comm::Range own = comm::part_of(sum.part_end[part] - begin, peers.num_ranks, peers.rank);
  const auto* addends = static_cast<const uint4*>(sum.addends);
  auto* sums = static_cast<uint4*>(sum.sums);
  move<kSumThreads>(
      {begin + own.begin, begin + own.end}, thread,
      [&](int64_t i) { return load_multicast_sum<T>(addends + i); },
      [&](int64_t i, const uint4& bits) { store_multicast(sums + i, bits); });
}

// Sums part after part. The last CTA to finish a part announces its sums.
template <typename T>
__device__ void add(const Peers& peers, const SwitchSum& sum, int thread) {
  for (int part = 0; part < sum.num_parts; ++part) {
    if (thread < kWarp) {
      await_part(peers, sum, cuda::kAddends, part, thread, peers.limit);
    }
    sync_threads<kSumBarrier, kSumThreads>();  // lets all threads read what the lanes have seen
    add_part<T>(peers, sum, part, thread);
    sync_threads<kSumBarrier, kSumThreads>();  // all stores come before the announcement below
    if (thread >= kWarp) continue;
    bool is_last = false;
    if (thread == 0) {
      uint32_t* counter = peers.counters + kMaxChunks + part;
      // The add acquires and releases: it orders the last CTA after all others' stores.
      is_last = cuda::add_acq_rel(counter, 1) + 1 == gridDim.x;
      if (is_last) *counter = 0;  // for the next call, whose kernels start after this one
    }
    is_last = __shfl_sync(~0u, is_last, 0);
    __syncwarp();  // orders the other lanes after lane 0, too
    if (is_last) raise_part(peers, sum, cuda::kSums, part, thread);
  }
}

// Copies the sums out of this rank's workspace, part by part.
__device__ void copy_out(const Peers& peers, const SwitchSum& sum, int thread) {
  // A missing addend delays the sum, too. Twice the time lets the wait for the addend fail first,
  // which names the missing rank.
  cuda::SpinLimit limit = peers.limit;
  limit.budget_ns *= 2;
  const auto* from = static_cast<const uint4*>(sum.own_sums);
  auto* to = static_cast<uint4*>(sum.output);
  for (int part = 0; part < sum.num_parts; ++part) {
    if (thread < kWarp) await_part(peers, sum, cuda::kSums, part, thread, limit);
    sync_threads<kCopyBarrier, kCopyThreads>();  // lets all threads read what the lanes have seen
    move<kCopyThreads>(
        {part_begin(sum, part), sum.part_end[part]}, thread, [&](int64_t i) { return from[i]; },
        [&](int64_t i, const uint4& bits) { to[i] = bits; });
  }
}

// Three kinds of warps share a CTA, and wait for each other only through flags.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    switch_sum_kernel(const __grid_constant__ Peers peers, const __grid_constant__ SwitchSum sum) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kSumThreads) {
    add<T>(peers, sum, thread);
  } else if (thread < kSumThreads + kCopyThreads) {
    copy_out(peers, sum, thread - kSumThreads);
  } else if (blockIdx.x == 0) {
    relay(peers, sum, thread - kSumThreads - kCopyThreads);
  }
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kStoreBytes == 0;
}

template <typename T>
cudaError_t launch(const Peers& peers, const SwitchSum& sum, cudaStream_t stream) {
  switch_sum_kernel<T><<<static_cast<unsigned>(sum.num_ctas), kThreads, 0, stream>>>(peers, sum);
  return cudaGetLastError();
}

}  // namespace

cudaError_t load_switch_sum() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, switch_sum_kernel<__nv_bfloat16>);
  return error != cudaSuccess ? error
                              : cudaFuncGetAttributes(&attributes, switch_sum_kernel<__half>);
}

cudaError_t sum_in_switch(const Peers& peers, const SwitchSum& sum, cudaStream_t stream) {
  const void* const places[] = {sum.addends, sum.sums, sum.own_sums, sum.output};
  if (sum.num_parts < 1 || sum.num_parts > kMaxChunks || sum.num_ctas < 1 ||
      !std::all_of(std::begin(places), std::end(places), is_aligned)) {
    return cudaErrorInvalidValue;
  }
  if (sum.dtype == DataType::kBFloat16) return launch<__nv_bfloat16>(peers, sum, stream);
  if (sum.dtype == DataType::kFloat16) return launch<__half>(peers, sum, stream);
  return cudaErrorInvalidValue;
}

}  // namespace axonn::kernels::sm90
