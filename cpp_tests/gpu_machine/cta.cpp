#include "gpu_machine/cta.h"

#include <utility>

#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {

uint32_t Cta::live_threads() const {
  uint32_t threads = 0;
  for (const auto& warp : warps) {
    threads += static_cast<uint32_t>(__builtin_popcount(warp->live_lanes()));
  }
  return threads;
}

void Cta::complete_barriers() {
  for (uint32_t number = 0; number < barriers.size(); ++number) {
    Barrier& barrier = barriers[number];
    if (barrier.arrived == 0) continue;
    const uint32_t expected = barrier.expected != 0 ? barrier.expected : live_threads();
    if (barrier.arrived < expected) continue;
    const Barrier complete = std::exchange(barrier, Barrier{});
    for (Warp* warp : complete.waiting) warp->leave_barrier(number, complete);
    warps.front()->machine.note_change();
  }
}

uint32_t Cluster::live_threads() const {
  uint32_t threads = 0;
  for (const auto& cta : ctas) threads += cta->live_threads();
  return threads;
}

void Cluster::complete_barrier() {
  if (arrived == 0 || arrived < live_threads()) return;
  arrived = 0;
  complete = arriving;
  ++phase;
  ctas.front()->warps.front()->machine.note_change();
}

}  // namespace axonn::gpu_machine
