// CTAs and the clusters they form: shared memory, and barriers within and between CTAs.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "gpu_machine/mbarrier.h"
#include "gpu_machine/memory.h"
#include "gpu_machine/products.h"
#include "gpu_machine/warp.h"

namespace axonn::gpu_machine {

struct Barrier {
  uint32_t arrived = 0, expected = 0;  // threads; 0 expected means the whole CTA
  Clock clock;
  uint32_t popc = 0;
  bool all = true, any = false;
  std::vector<Warp*> waiting;
};

struct Cluster;

struct Cta {
  Cta(int64_t number, Dim place, uint32_t its_rank, uint64_t shared_bytes, Cluster& of_cluster)
      : id(number),
        index(place),
        rank(its_rank),
        shared("shared memory", kVariablesStart + shared_bytes),
        cluster(of_cluster) {
    shared.is_shared = true;
  }
  int64_t id;
  Dim index;
  uint32_t rank;  // in the cluster
  Region shared;
  std::array<Barrier, 16> barriers;
  std::unordered_map<uint64_t, MBarrier> mbarriers;  // by offset in shared memory
  std::vector<std::unique_ptr<Warp>> warps;
  std::map<int, Warpgroup> warpgroups;  // those that multiply, by number
  Cluster& cluster;
  uint32_t free_registers = 0;  // given back by setmaxnreg.dec
  bool has_left = false;
  int sm = 0;  // the SM it runs on

  uint32_t live_threads() const;
  // Completes the barriers at which all expected threads have arrived.
  void complete_barriers();
};

// CTAs that run at the same time and reach each other's shared memory. Without clusters, each CTA
// is its own cluster.
struct Cluster {
  int64_t id = 0;  // the id of its first CTA
  Dim shape;
  std::vector<std::unique_ptr<Cta>> ctas;  // by rank

  // barrier.cluster: a phase ends when all threads that have not exited have arrived.
  uint32_t arrived = 0;
  uint64_t phase = 0;
  Clock arriving, complete;  // of the arrivals in this phase, and of those in the last one

  uint32_t live_threads() const;
  void complete_barrier();
};

}  // namespace axonn::gpu_machine
