// The life of CTAs and clusters: they start together, and leave when they are no longer needed.
#include <algorithm>

#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {

void Machine::start_cluster(Launch& launch, const std::vector<int>& sms) {
  const uint32_t place = launch.order[launch.next_cluster++];
  const Dim grid = launch.grid, shape = launch.cluster;
  const Dim clusters{grid.x / shape.x, grid.y / shape.y, grid.z / shape.z};
  const Dim first{place % clusters.x * shape.x, place / clusters.x % clusters.y * shape.y,
                  place / clusters.x / clusters.y * shape.z};
  launch.clusters.push_back(std::make_unique<Cluster>());
  Cluster& cluster = *launch.clusters.back();
  cluster.id = ctas_;
  cluster.shape = shape;
  for (uint32_t rank = 0; rank < shape.count(); ++rank) {
    const Dim index{first.x + rank % shape.x, first.y + rank / shape.x % shape.y,
                    first.z + rank / shape.x / shape.y};
    cluster.ctas.push_back(make_cta(launch, index, cluster));
    cluster.ctas.back()->sm = sms[rank];
    for (const auto& warp : cluster.ctas.back()->warps) live_.push_back(warp.get());
  }
  resident_[launch.device] += static_cast<int>(shape.count());
  note_change();
}

std::unique_ptr<Cta> Machine::make_cta(Launch& launch, Dim index, Cluster& cluster) {
  const uint64_t shared = launch.program->shared_bytes + launch.dynamic_shared_bytes;
  const auto rank = static_cast<uint32_t>(cluster.ctas.size());
  auto cta = std::make_unique<Cta>(ctas_++, index, rank, shared, cluster);
  const auto threads = static_cast<uint32_t>(launch.block.count());
  for (uint32_t first = 0; first < threads; first += kLanes) {
    const uint32_t left = threads - first;
    const uint32_t lanes = left >= kLanes ? kAllLanes : (1u << left) - 1;
    cta->warps.push_back(
        std::make_unique<Warp>(*this, launch, *cta, static_cast<int>(first / kLanes), lanes));
  }
  return cta;
}

void Machine::retire(Warp& warp) {
  live_.erase(std::find(live_.begin(), live_.end(), &warp));
  warp.launch.after.join(warp.snapshot());
  note_change();
  Launch& launch = warp.launch;
  Cta& cta = warp.cta;
  if (cta.live_threads() != 0) return;
  leave(cta, warp);
  Cluster& cluster = cta.cluster;
  if (cluster.live_threads() != 0) return;
  resident_[launch.device] -= static_cast<int>(cluster.ctas.size());
  for (const auto& left : cluster.ctas) residency(launch.device).give(launch.footprint, left->sm);
  std::erase_if(launch.clusters, [&](const auto& other) { return other.get() == &cluster; });
  note_end(launch);
}

// The CTA's shared memory goes away; nothing may still need it.
void Machine::leave(Cta& cta, const Warp& last) {
  cta.has_left = true;
  cta.shared.freed = true;
  if (const AsyncOperation* user = async_.user_of(cta)) {
    last.fail(MachineError::Kind::kMemory,
              "the CTA leaves while its shared memory is in use by " + user->describe());
  }
  check_is_last(cta, last);
}

// When the CTA's warps leave, they must know of everything that peers and asynchronous operations
// did in its shared memory.
void Machine::check_is_last(const Cta& cta, const Warp& last) const {
  Clock known;
  for (const auto& warp : cta.warps) known.join(warp->clock);
  // `what`, and the place at `where`, go into the message.
  const auto check = [&](uint32_t id, uint32_t time, const char* what, uint64_t where) {
    if (id == 0) return;
    const Actor& other = actors_[id];
    if ((other.cta == cta.id && !other.is_async) || known.has_seen(id, other.launch, time)) return;
    last.fail(MachineError::Kind::kRace,
              "race: the CTA leaves, and nothing orders that after " + std::string(what) +
                  " shared memory + " + std::to_string(where) + " by " +
                  (other.is_async ? "an asynchronous operation of warp " : "warp ") +
                  std::to_string(other.warp) +
                  (other.cta == cta.id ? "" : " of another CTA of its cluster"));
  };
  for (const auto& [offset, barrier] : cta.mbarriers) {
    for (const auto& arrival : barrier.remote_arrivals()) {
      check(arrival.actor, arrival.time, "the arrival at the mbarrier at", offset);
    }
  }
  Granule checked;
  for (uint64_t i = kVariablesStart / kGranuleBytes; i < cta.shared.granules.size(); ++i) {
    const Granule& granule = cta.shared.granules[i];
    if (granule == checked) continue;
    const uint64_t where = i * kGranuleBytes;
    if (granule.write != checked.write) {
      check(granule.write.actor, granule.write.time, "the write of", where);
    }
    for (int read = 0; read < 2; ++read) {
      const Mark& mark = granule.reads[read];
      if (mark != checked.reads[read]) check(mark.actor, mark.time, "the read of", where);
    }
    checked = granule;
  }
}

void Machine::note_end(const Launch& launch) {
  if (!launch.clusters.empty() || launch.next_cluster < launch.order.size()) return;
  if (async_.has_any_of(launch)) return;
  for (Stream& stream : streams_) {
    if (stream.has_begun && stream.queue.front().launch.get() == &launch) return end_work(stream);
  }
}

}  // namespace axonn::gpu_machine
