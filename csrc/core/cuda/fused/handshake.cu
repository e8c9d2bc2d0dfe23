#include "core/cuda/fused/flags.cuh"
#include "core/cuda/fused/handshake.h"

namespace axonn::kernels::cuda {
namespace {

constexpr int kWarp = 32;
static_assert(kMaxPeers <= kWarp && kMaxChunks <= kWarp, "a lane for each");

__global__ void __launch_bounds__(kWarp)
    begin_kernel(const __grid_constant__ Peers peers, int32_t own_chunks) {
  const int lane = static_cast<int>(threadIdx.x);
  const uint32_t before = *peers.epoch;
  if (!peers.apart && lane < peers.num_ranks && lane != peers.rank) {
    // Pairs with end_kernel: the peer has finished the reads of the previous call.
    await_flag(flag_at(peers.pads[peers.rank], kDoneFlags + lane), before, peers.limit, {1, lane});
    // The multicast address may now overwrite memory that the peer read through its own address.
    if (peers.multicast != nullptr) fence_aliases();
  }
  __syncwarp();
  if (lane < own_chunks) {
    store_release(flag_at(peers.pads[peers.rank], peers.rank * own_chunks + lane), before + 1);
  }
  if (lane == 0) {
    *peers.epoch = before + 1;
    *peers.epoch_to_push = before + 1;
  }
}

__global__ void __launch_bounds__(kWarp)
    raise_kernel(const __grid_constant__ Peers peers, comm::SignalLayout layout, int32_t phase) {
  const int lane = static_cast<int>(threadIdx.x);
  const auto per_shard = static_cast<int32_t>(layout.chunks_per_shard);
  if (lane < peers.num_ranks * per_shard) {
    // Pairs with await_kernel. This flag announces the stores of earlier kernels. Those stores may
    // have used the multicast address; this one does not.
    if (peers.multicast != nullptr) fence_aliases();
    const int64_t flag = layout.flag(phase, {peers.rank, lane % per_shard});
    store_release(flag_at(peers.pads[lane / per_shard], flag), *peers.epoch);
  }
}

__global__ void __launch_bounds__(kWarp)
    await_kernel(const __grid_constant__ Peers peers, comm::SignalLayout layout, int32_t phase) {
  const int lane = static_cast<int>(threadIdx.x);
  const auto per_shard = static_cast<int32_t>(layout.chunks_per_shard);
  if (lane < peers.num_ranks * per_shard) {
    // Pairs with the sender's release. The kernels that follow see what the sender wrote.
    const int64_t flag = layout.flag(phase, {lane / per_shard, lane % per_shard});
    await_flag(flag_at(peers.pads[peers.rank], flag), *peers.epoch, peers.limit, {per_shard, lane});
    // The kernels that follow read, through this rank's own address, data written through the
    // multicast address.
    if (peers.multicast != nullptr) fence_aliases();
  }
}

__global__ void await_own_kernel(const __grid_constant__ Peers peers) {
  // Pairs with push_flag, which comes last on its stream.
  await_flag(flag_at(peers.pads[peers.rank], kDoneFlags + peers.rank), *peers.epoch, peers.limit,
             {1, peers.rank});
}

__global__ void __launch_bounds__(kWarp) end_kernel(const __grid_constant__ Peers peers) {
  const int lane = static_cast<int>(threadIdx.x);
  if (!peers.apart && lane < peers.num_ranks && lane != peers.rank) {
    store_release(flag_at(peers.pads[lane], kDoneFlags + peers.rank), *peers.epoch);
  }
}

}  // namespace

cudaError_t load_handshake() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, begin_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, raise_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, await_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, await_own_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, end_kernel);
  return error;
}

cudaError_t begin_call(const Peers& peers, int32_t own_chunks, cudaStream_t stream) {
  begin_kernel<<<1, kWarp, 0, stream>>>(peers, own_chunks);
  return cudaGetLastError();
}

cudaError_t raise_chunks(const Peers& peers, const comm::SignalLayout& layout, int32_t phase,
                         cudaStream_t stream) {
  raise_kernel<<<1, kWarp, 0, stream>>>(peers, layout, phase);
  return cudaGetLastError();
}

cudaError_t await_chunks(const Peers& peers, const comm::SignalLayout& layout, int32_t phase,
                         cudaStream_t stream) {
  await_kernel<<<1, kWarp, 0, stream>>>(peers, layout, phase);
  return cudaGetLastError();
}

cudaError_t await_own(const Peers& peers, cudaStream_t stream) {
  await_own_kernel<<<1, 1, 0, stream>>>(peers);
  return cudaGetLastError();
}

cudaError_t end_call(const Peers& peers, cudaStream_t stream) {
  end_kernel<<<1, kWarp, 0, stream>>>(peers);
  return cudaGetLastError();
}

}  // namespace axonn::kernels::cuda
