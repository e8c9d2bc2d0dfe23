#include "gpu_machine/runtime/nccl/meeting.h"

#include <algorithm>
#include <cstring>

#include "gpu_machine/machine.h"

namespace axonn::gpu_machine::nccl {
namespace {

bool has(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

// Bytes of an allocation, which a rank accesses as a kernel does.
struct Span {
  Span(Agent& agent, const void* base, int64_t at, int64_t bytes) {
    const uint64_t address = reinterpret_cast<uint64_t>(base) + static_cast<uint64_t>(at);
    region = agent.machine.region_at(address);
    offset = address & (window_start(1) - 1);
    if (region == nullptr || region->freed ||
        offset + static_cast<uint64_t>(bytes) > region->bytes.size()) {
      agent.fail(MachineError::Kind::kMemory, "NCCL reaches outside an allocation", -1);
    }
  }
  std::byte* data() const { return region->bytes.data() + offset; }

  Region* region;
  uint64_t offset;
};

}  // namespace

Meeting::Meeting(const Call& call, int rank, int num_ranks, Choices choices, Place place)
    : first_(call), choices_(std::move(choices)), place_(std::move(place)) {
  int next = 0;
  for (const Block& block : blocks_of(call, rank, num_ranks)) {
    int64_t begin = 0;
    for (size_t i = 0; i <= choices_.cuts.size(); ++i) {
      const int64_t end =
          i == choices_.cuts.size()
              ? call.count
              : static_cast<int64_t>(choices_.cuts[i] * static_cast<double>(call.count));
      // A transfer of nothing is still a transfer that both ranks wait for.
      if (end == begin && !(call.count == 0 && i == 0)) continue;
      const int channel = choices_.channels == 0 ? -1 : next++ % choices_.channels;
      pieces_.push_back({block, begin, end - begin, channel, {}, {}});
      begin = end;
    }
  }
}

bool Meeting::gives(const Piece& piece, int rank) const {
  return has(piece.block.sources, rank) && !piece.given.contains(rank);
}

bool Meeting::takes(const Piece& piece, int rank) const {
  return has(piece.block.sinks, rank) && !piece.taken.contains(rank);
}

// --- Ranks in other processes ---

std::string Meeting::given_name(size_t piece, int rank) const {
  return place_.name + ".piece" + std::to_string(piece) + ".given" + std::to_string(rank);
}

std::string Meeting::taken_name(size_t piece, int rank) const {
  return place_.name + ".piece" + std::to_string(piece) + ".taken" + std::to_string(rank);
}

bool Meeting::have_all_given(size_t index, int64_t bytes, const Agent& agent) {
  Piece& piece = pieces_[index];
  if (place_.wire != nullptr) {
    for (const int source : piece.block.sources) {
      if (piece.given.contains(source)) continue;
      auto read = place_.wire->get(given_name(index, source));
      if (!read) return false;
      if (static_cast<int64_t>(read->size()) != bytes) {
        agent.fail(MachineError::Kind::kMisuse,
                   "NCCL: rank " + std::to_string(source) + " gives " +
                       std::to_string(read->size()) + " bytes, not " + std::to_string(bytes),
                   -1);
      }
      piece.given[source].bytes = std::move(*read);
    }
  }
  return piece.given.size() == piece.block.sources.size();
}

// The last sink clears the wire: first the data given, whose absence informs the sources.
void Meeting::note_taken(size_t index, int rank) {
  Piece& piece = pieces_[index];
  piece.taken.insert(rank);
  if (place_.wire == nullptr) return;
  place_.wire->put(taken_name(index, rank));
  for (const int sink : piece.block.sinks) {
    if (!place_.wire->has(taken_name(index, sink))) return;
  }
  for (const int source : piece.block.sources) place_.wire->remove(given_name(index, source));
  for (const int sink : piece.block.sinks) place_.wire->remove(taken_name(index, sink));
}

bool Meeting::have_all_taken(size_t index, int rank) const {
  const Piece& piece = pieces_[index];
  if (place_.wire != nullptr) return !place_.wire->has(given_name(index, rank));
  return piece.taken.size() == piece.block.sinks.size();
}

bool Meeting::step(size_t index, int rank, const Call& call, Agent& agent) {
  Piece& piece = pieces_[index];
  const int64_t size = size_of(call.dtype), bytes = piece.count * size;
  if (gives(piece, rank) && call.kind != Kind::kReceive) {
    Piece::Given given{std::vector<std::byte>(static_cast<size_t>(bytes)), {}};
    if (bytes > 0) {
      const Span from(agent, call.input, (piece.block.input + piece.begin) * size, bytes);
      agent.note_read(*from.region, from.offset, static_cast<uint32_t>(bytes), Access{}, -1);
      std::memcpy(given.bytes.data(), from.data(), given.bytes.size());
    }
    given.clock = agent.snapshot();
    if (place_.wire != nullptr) place_.wire->put(given_name(index, rank), given.bytes);
    piece.given.emplace(rank, std::move(given));
    return true;
  }
  if (!takes(piece, rank) || call.kind == Kind::kSend) return false;
  if (!have_all_given(index, bytes, agent)) return false;
  for (const auto& [source, given] : piece.given) agent.clock.join(given.clock);
  note_taken(index, rank);
  // In place, a rank's own block is already there.
  const int64_t input = (piece.block.input + piece.begin) * size;
  const int64_t output = (piece.block.output + piece.begin) * size;
  const bool is_there = !call.is_sum() && has(piece.block.sources, rank) &&
                        static_cast<const char*>(call.input) + input ==
                            static_cast<const char*>(call.output) + output;
  if (bytes > 0 && !is_there) {
    const Span to(agent, call.output, output, bytes);
    agent.note_write(*to.region, to.offset, static_cast<uint32_t>(bytes), Access{}, -1);
    std::memcpy(to.data(), result(piece).data(), static_cast<size_t>(bytes));
  }
  return true;
}

// A ring adds the part for rank r in the order of ranks that ends with r. A result that all ranks
// get is also cut into parts for the ranks.
std::vector<std::byte> Meeting::result(const Piece& piece) const {
  if (!first_.is_sum()) return piece.given.begin()->second.bytes;
  const std::vector<int>& ring = choices_.ring;
  const auto place = static_cast<size_t>(&piece - pieces_.data());
  const size_t end =
      piece.block.sinks.size() == 1
          ? static_cast<size_t>(std::find(ring.begin(), ring.end(), piece.block.sinks.front()) -
                                ring.begin())
          : place % ring.size();
  std::vector<const std::vector<std::byte>*> addends;
  for (size_t i = 1; i <= ring.size(); ++i) {
    addends.push_back(&piece.given.at(ring[(end + i) % ring.size()]).bytes);
  }
  return combine(addends, first_.dtype, first_.op, choices_.rounding);
}

bool Meeting::is_over(size_t index, int rank) const {
  const Piece& piece = pieces_[index];
  if (gives(piece, rank) || takes(piece, rank)) return false;
  const bool waits = !choices_.buffers && has(piece.block.sources, rank);
  return !waits || have_all_taken(index, rank);
}

void Meeting::add_awaited(int rank, std::set<int>& awaited) const {
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    if (is_over(i, rank)) continue;
    if (takes(piece, rank)) {
      for (const int source : piece.block.sources) {
        if (!piece.given.contains(source)) awaited.insert(source);
      }
    } else {
      for (const int sink : piece.block.sinks) {
        if (!piece.taken.contains(sink)) awaited.insert(sink);
      }
    }
  }
  awaited.erase(rank);
}

}  // namespace axonn::gpu_machine::nccl
