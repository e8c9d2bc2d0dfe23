// Memory accesses of a warp, and its error reports.
#include <bit>

#include "gpu_machine/machine.h"
#include "gpu_machine/warp.h"

namespace axonn::gpu_machine {
namespace {

std::string place_of(const Program& program, uint32_t pc) {
  if (pc >= program.instructions.size()) return "its end";
  const Instruction& instruction = program.instructions[pc];
  const SourceLine& where = instruction.where;
  std::string text = "`" + instruction.text + "` (PTX line " + std::to_string(where.ptx);
  const auto file = program.files->find(where.file);
  if (file != program.files->end()) {
    text += ", " + file->second + ":" + std::to_string(where.cuda_line);
  }
  return text + ")";
}

// "0 3-5"
std::string lanes_of(uint32_t mask) {
  std::string text;
  for (int first = 0; first < kLanes; ++first) {
    if ((mask >> first & 1u) == 0) continue;
    int last = first;
    while (last + 1 < kLanes && (mask >> (last + 1) & 1u) != 0) ++last;
    if (!text.empty()) text += ' ';
    text += std::to_string(first);
    if (last != first) text.append(1, '-').append(std::to_string(last));
    first = last;
  }
  return text;
}

}  // namespace

std::string short_name(const std::string& name) {
  constexpr size_t kEnds = 60;  // names of CUTLASS templates have thousands of characters
  if (name.size() <= 2 * kEnds) return name;
  return name.substr(0, kEnds) + "..." + name.substr(name.size() - kEnds);
}

std::string Origin::describe() const {
  std::string text = place_of(*launch.program, pc) + ", rank " + std::to_string(launch.device) +
                     ", CTA (" + std::to_string(cta.x) + ", " + std::to_string(cta.y) + ", " +
                     std::to_string(cta.z) + "), warp " + std::to_string(warp);
  if (lane >= 0) text += ", lane " + std::to_string(lane);
  return text;
}

void Warp::fail(MachineError::Kind kind, const std::string& what, int lane) const {
  throw MachineError(kind, "kernel " + short_name(launch.program->name) + ": " + what + "; " +
                               origin(lane).describe());
}

Origin Warp::origin(int lane) const { return {launch, cta.index, index, lane, current_pc_}; }

void Warp::fail_stuck() const {
  fail(MachineError::Kind::kDeadlock, "its lanes wait for each other: " + describe_wait());
}

std::string Warp::describe_wait() const {
  std::string text;
  for (const Fragment& fragment : fragments_) {
    if (!text.empty()) text += "; ";
    text.append("lanes ").append(lanes_of(fragment.mask));
    switch (fragment.state) {
      case Fragment::State::kAtBarrier:
        text += " wait at barrier " + std::to_string(fragment.barrier) + " of the CTA, at ";
        break;
      case Fragment::State::kAtMeeting:
        text += " wait for other lanes, at ";
        break;
      case Fragment::State::kWaiting:
        text += " wait at ";
        break;
      case Fragment::State::kReady:
        text += " are at ";
    }
    text += place_of(*launch.program, fragment.pc);
  }
  if (polled_ != 0) {
    const Region* region = machine.region_at(polled_);
    const uint64_t offset = polled_ & (window_start(1) - 1);
    text += "; the last flag it read is " + (region == nullptr ? "shared memory" : region->name) +
            " + " + std::to_string(offset) + ", by " + place_of(*launch.program, polled_pc_);
    const auto barrier = cta.mbarriers.find(offset);
    if (region == nullptr && barrier != cta.mbarriers.end()) {
      text += "; this mbarrier's " + barrier->second.describe();
    }
  }
  return text;
}

const Slot* Warp::list(const Op& op) const { return launch.program->lists.data() + op.list; }

const Slot* Warp::touched(const Op& op) const { return launch.program->lists.data() + op.touched; }

// A lane's local memory ends at the bounds of its own part.
Warp::Place Warp::local_place(uint64_t offset, uint64_t bytes, int lane) {
  const uint64_t size = launch.program->local_bytes;
  if (offset < kVariablesStart || offset + bytes > kVariablesStart + size) {
    return {nullptr, offset, nullptr};
  }
  return {local_.get(), offset - kVariablesStart + size * static_cast<uint64_t>(lane), nullptr};
}

Warp::Place Warp::place(uint64_t address, uint64_t bytes, uint64_t alignment, int lane,
                        bool reaches_cluster) {
  const uint64_t window = address >> kWindowBits;
  Place at{nullptr, address & (window_start(1) - 1), nullptr};
  if (window == kParamWindow) {
    at.region = launch.params.get();
  } else if (window == kSharedWindow) {
    at.cta = &cta_at(at.offset, lane, reaches_cluster);
    at.offset &= (uint64_t{1} << kSharedBits) - 1;
    at.region = &at.cta->shared;
  } else if (window == kLocalWindow) {
    at = local_place(at.offset, bytes, lane);
  } else {
    at.region = machine.region_at(address);
    if (at.region != nullptr) {
      at.alias = machine.memory().alias_of(address);
    } else if (machine.memory().team_of(address) != nullptr) {
      fail(MachineError::Kind::kUndefined, "a multicast address takes multimem instructions alone",
           lane);
    }
  }
  const bool is_reserved = at.cta != nullptr && at.offset < kVariablesStart;
  if (at.region == nullptr || is_reserved || at.region->freed ||
      at.offset + bytes > at.region->bytes.size()) {
    const std::string why = at.cta != nullptr ? ", of a CTA that has left" : ", which was freed";
    const std::string near = at.region == nullptr ? "no allocation"
                                                  : at.region->name + " of " +
                                                        std::to_string(at.region->bytes.size()) +
                                                        " bytes" + (at.region->freed ? why : "");
    fail(MachineError::Kind::kMemory,
         "reaches " + std::to_string(bytes) + " bytes outside memory, at offset " +
             std::to_string(at.offset) + " of " + near,
         lane);
  }
  if (!machine.may_reach(launch.device, *at.region)) {
    fail(MachineError::Kind::kMemory,
         "reaches " + at.region->name + ", which rank " + std::to_string(launch.device) +
             " has not enabled as a peer",
         lane);
  }
  if (at.offset % alignment != 0) {
    fail(MachineError::Kind::kMemory,
         "is misaligned: offset " + std::to_string(at.offset) + " of " + at.region->name +
             " is no multiple of " + std::to_string(alignment),
         lane);
  }
  return at;
}

Cta& Warp::cta_at(uint64_t offset, int lane, bool reaches_cluster) const {
  const uint64_t window = offset >> kSharedBits;
  if (window == 0) return cta;
  if (window > cta.cluster.ctas.size()) {
    fail(MachineError::Kind::kMemory, "reaches shared memory of no CTA of the cluster", lane);
  }
  Cta& other = *cta.cluster.ctas[window - 1];
  if (&other != &cta && !reaches_cluster) {
    fail(MachineError::Kind::kMemory,
         "reaches another CTA's memory by an instruction for .shared::cta", lane);
  }
  return other;
}

Warp::Place Warp::place_of_access(const Op& op, uint64_t address, uint32_t bytes, int lane) {
  return place(address, bytes, bytes, lane, op.at.reaches_cluster);
}

void Warp::note_poll(uint64_t address) {
  polled_ = address;
  polled_pc_ = current_pc_;
}

const std::byte* Warp::read(const Op& op, uint64_t address, uint32_t bytes, int lane) {
  const Place at = place_of_access(op, address, bytes, lane);
  note_read(*at.region, at.offset, bytes, {op.order, op.scope, at.alias}, lane);
  if (op.order != Order::kWeak) note_poll(address);
  return at.region->bytes.data() + at.offset;
}

std::byte* Warp::write(const Op& op, uint64_t address, uint32_t bytes, int lane) {
  const Place at = place_of_access(op, address, bytes, lane);
  if (at.region->read_only) fail(MachineError::Kind::kMemory, "writes what is read-only", lane);
  note_write(*at.region, at.offset, bytes, {op.order, op.scope, at.alias}, lane);
  return at.region->bytes.data() + at.offset;
}

std::byte* Warp::update(const Op& op, uint64_t address, uint32_t bytes, int lane) {
  const Place at = place_of_access(op, address, bytes, lane);
  if (at.region->read_only) fail(MachineError::Kind::kMemory, "writes what is read-only", lane);
  note_update(*at.region, at.offset, bytes, {op.order, op.scope, at.alias}, lane);
  note_poll(address);
  return at.region->bytes.data() + at.offset;
}

}  // namespace axonn::gpu_machine
