#include "core/cuda/fused/write_probe.h"

#include "core/cuda/check.h"
#include "core/cuda/fused/copies.h"
#include "core/cuda/fused/peer_state.h"
#include "core/cuda/fused/write_value.h"

namespace axonn::kernels::cuda {
namespace {

constexpr uint32_t kProbe = 0x5eed0001;  // a value that fresh memory is unlikely to hold
constexpr int kNoRemoteWrites = 13010;   // CUDA 13.1, as cudaDriverGetVersion reports it

// Returns the address of a rank's word in a pad.
void* probe_at(void* pad, int32_t rank) {
  return at(pad, kPadBytes + kProbeOffset + rank * static_cast<int64_t>(sizeof(uint32_t)));
}

}  // namespace

void write_probes(const Peers& peers, cudaStream_t stream) {
  int driver = 0;
  AXONN_CUDA_CHECK(cudaDriverGetVersion(&driver));
  if (driver >= kNoRemoteWrites) return;
  for (int32_t to = 0; to < peers.num_ranks; ++to) {
    if (to == peers.rank) continue;
    const cudaError_t refused = write_value(probe_at(peers.pads[to], peers.rank), kProbe, stream);
    if (refused != cudaSuccess) (void)cudaGetLastError();  // else the next launch may report it
  }
  AXONN_CUDA_CHECK(cudaStreamSynchronize(stream));
}

uint32_t arrived_probes(const Peers& peers, cudaStream_t stream) {
  uint32_t words[kMaxPeers] = {};
  copy(words, probe_at(peers.pads[peers.rank], 0), sizeof(words), stream);
  AXONN_CUDA_CHECK(cudaStreamSynchronize(stream));
  uint32_t arrived = 0;
  for (int32_t from = 0; from < peers.num_ranks; ++from) {
    if (words[from] == kProbe) arrived |= uint32_t{1} << from;
  }
  return arrived;
}

}  // namespace axonn::kernels::cuda
