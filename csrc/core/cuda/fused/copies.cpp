#include "core/cuda/fused/copies.h"

#include "core/cuda/fused/write_value.h"

namespace axonn::kernels::cuda {

void push_flag(const Peers& peers, int32_t to, int64_t flag, cudaStream_t stream) {
  void* address = at(peers.pads[to], comm::signal_offset_bytes(flag));
  if (peers.host_counts && (peers.queue_writes >> to & 1) != 0) {
    const cudaError_t error = write_value(address, peers.host_epoch, stream);
    if (error != cudaErrorNotSupported) {
      AXONN_CUDA_CHECK(error);
      return;
    }
    (void)cudaGetLastError();  // else the next launch may report it
  }
  const bool leaves = peers.alone && to != peers.rank;
  copy(address, leaves ? peers.epoch : peers.epoch_to_push, sizeof(uint32_t), stream);
}

}  // namespace axonn::kernels::cuda
