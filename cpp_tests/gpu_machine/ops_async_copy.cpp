// cp.async: copies from global to shared memory, which happen at any time between the instruction
// and the wait. Source: PTX ISA 9.0, section 9.7.9.25.3.
#include <algorithm>
#include <cstring>

#include "gpu_machine/copy_groups.h"
#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {

void CopyGroups::add(const Operation& operation, uint32_t mask) {
  entries_.push_back({operation, mask, committed_, {}});
}

void CopyGroups::commit(uint32_t mask) {
  for_each_lane(mask, [&](int lane) { ++committed_[static_cast<size_t>(lane)]; });
}

uint32_t CopyGroups::waiting(const Entry& entry, uint32_t mask, uint32_t most) const {
  uint32_t lanes = 0;
  for_each_lane(mask & entry.mask, [&](int lane) {
    const auto i = static_cast<size_t>(lane);
    if (most == kAll || uint64_t{entry.group[i]} + most < committed_[i]) lanes |= 1u << lane;
  });
  return lanes;
}

bool CopyGroups::have_ended(uint32_t mask, uint32_t most) const {
  return std::all_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.has_ended() || waiting(entry, mask, most) == 0;
  });
}

void CopyGroups::learn(Agent& who, uint32_t mask, uint32_t most) {
  for (Entry& entry : entries_) {
    const uint32_t lanes = waiting(entry, mask, most);
    if (lanes == 0) continue;
    who.clock.join(entry.clock());
    ended_.join(entry.clock());
    entry.mask &= ~lanes;
  }
  std::erase_if(entries_, [](const Entry& entry) { return entry.mask == 0; });
}

std::vector<CopyGroups::Operation> CopyGroups::under_way(uint32_t mask) const {
  std::vector<Operation> operations;
  for (const Entry& entry : entries_) {
    if ((entry.mask & mask) != 0 && !entry.has_ended()) operations.push_back(entry.operation);
  }
  return operations;
}

void CopyGroups::forget_ended() {
  std::vector<Entry> kept;
  for (Entry& entry : entries_) {
    if (!entry.has_ended()) {
      kept.push_back(std::move(entry));
      continue;
    }
    ended_.join(entry.clock());
    const auto same = std::find_if(kept.begin(), kept.end(), [&](const Entry& other) {
      return other.operation == nullptr && other.mask == entry.mask && other.group == entry.group;
    });
    if (same != kept.end()) {
      same->seen.join(entry.clock());
    } else {
      kept.push_back({nullptr, entry.mask, entry.group, entry.clock()});
    }
  }
  entries_ = std::move(kept);
}

namespace {

constexpr uint64_t kIdentity = 0xC0;  // sets these operations apart from others
const Type kWord{'b', 32, 1};

// The copies of the lanes of one instruction. Some lanes' pieces are copied before others.
class WarpCopy final : public AsyncOperation {
 public:
  struct Piece {
    Warp::Place target, source;
    uint32_t bytes, read_bytes;  // the rest of `bytes` is zero
  };

  WarpCopy(Warp& issuer, std::vector<Piece> pieces)
      : AsyncOperation(issuer, -1, Proxy::kGeneric, {issuer.actor.id, kIdentity}),
        cta_(issuer.cta),
        pieces_(std::move(pieces)) {}

  void step() override {
    const size_t left = pieces_.size();
    const size_t stays = machine.draw(2) == 0 ? 0 : machine.draw(static_cast<uint32_t>(left));
    while (pieces_.size() > stays) {
      std::swap(pieces_[machine.draw(static_cast<uint32_t>(pieces_.size()))], pieces_.back());
      copy(pieces_.back());
      pieces_.pop_back();
    }
    if (pieces_.empty()) reach(Stage::kDone);
  }

  bool uses(const Cta& cta) const override { return &cta == &cta_; }

 private:
  void copy(const Piece& piece) {
    Region& target = *piece.target.region;
    note_write(target, piece.target.offset, piece.bytes, {}, -1);
    std::byte* to = target.bytes.data() + piece.target.offset;
    std::memset(to, 0, piece.bytes);
    if (piece.read_bytes == 0) return;
    Region& source = *piece.source.region;
    note_read(source, piece.source.offset, piece.read_bytes,
              {Order::kWeak, Scope::kNone, piece.source.alias}, -1);
    std::memcpy(to, source.bytes.data() + piece.source.offset, piece.read_bytes);
  }

  const Cta& cta_;
  std::vector<Piece> pieces_;
};

// For cp.async, an Op's `count` is the bytes that each lane writes; `b` is how many of them are
// read (`has_count`), or `c` is a predicate to read none (`choice` is 1).
void begin_copy(const Op& op, Warp& warp, uint32_t mask) {
  std::vector<WarpCopy::Piece> pieces;
  for_each_lane(mask, [&](int lane) {
    uint32_t read = op.has_count ? warp.lanes<uint32_t>(op.b)[lane] : op.count;
    if (op.choice == 1 && ((warp.predicate(op.c) ^ op.negated) >> lane & 1u) != 0) read = 0;
    if (read > op.count) {
      warp.fail(MachineError::Kind::kUndefined,
                "reads " + std::to_string(read) + " bytes to write " + std::to_string(op.count),
                lane);
    }
    const Warp::Place target = warp.place(warp.address(op, lane), op.count, op.count, lane, false);
    Warp::Place source{nullptr, 0, nullptr};
    if (read != 0) {
      source = warp.place(warp.address(op.from, lane), read, op.count, lane, false);
      if (source.cta != nullptr) {
        warp.fail(MachineError::Kind::kMemory, "copies from shared memory", lane);
      }
    }
    pieces.push_back({target, source, op.count, read});
  });
  const auto operation = std::make_shared<WarpCopy>(warp, std::move(pieces));
  warp.copies().add(operation, mask);
  warp.machine.async().begin(operation);
}

void commit(const Op&, Warp& warp, uint32_t mask) { warp.copies().commit(mask); }

bool have_ended(const Op& op, Warp& warp, uint32_t mask) {
  return warp.copies().have_ended(mask, op.count);
}

void learn(const Op& op, Warp& warp, uint32_t mask) { warp.copies().learn(warp, mask, op.count); }

bool all_have_ended(const Op&, Warp& warp, uint32_t mask) {
  return warp.copies().have_ended(mask, CopyGroups::kAll);
}

void learn_all(const Op&, Warp& warp, uint32_t mask) {
  warp.copies().commit(mask);  // wait_all is commit_group plus wait_group 0
  warp.copies().learn(warp, mask, 0);
}

void decode_wait(Decoder& d, bool all) {
  Op& op = d.op();
  op.flow = Flow::kWait;
  op.ready = all ? all_have_ended : have_ended;
  op.execute = all ? learn_all : learn;
  if (all) return;
  const Operand& most = d.operand(0);
  if (most.kind != Operand::Kind::kImmediate || most.bits > 255) {
    d.fail("expected a number of groups up to 255");
  }
  op.count = static_cast<uint8_t>(most.bits);
}

void decode_copy(Decoder& d) {
  Op& op = d.op();
  const std::string cache = d.take_first(), target = d.take_first(), source = d.take_first();
  const bool is_known_way = (cache == "ca" || cache == "cg") && source == "global" &&
                            (target == "shared" || target == "shared::cta");
  if (!is_known_way) d.fail("expected .ca or .cg, .shared and .global");
  d.take_one({"L2::64B", "L2::128B", "L2::256B"});
  const bool has_hint = d.take("L2::cache_hint");
  op.at = d.address(0, Space::kShared);
  op.from = d.address(1, Space::kGlobal);
  const Operand& bytes = d.operand(2);
  const bool is_known =
      bytes.kind == Operand::Kind::kImmediate &&
      (bytes.bits == 16 || (cache == "ca" && (bytes.bits == 4 || bytes.bits == 8)));
  if (!is_known) d.fail("copies have 16 bytes, with .ca also 4 or 8");
  op.count = static_cast<uint8_t>(bytes.bits);
  const size_t extra = d.num_operands() - 3 - (has_hint ? 1 : 0);
  if (extra > 1) d.fail("it has more operands than the machine knows");
  if (extra == 1 && d.is_predicate(3)) {
    op.c = d.predicate(3);
    op.choice = 1;
  } else if (extra == 1) {
    op.b = d.slot(3, kWord);
    op.has_count = true;
  }
  if (has_hint) d.slot(3 + extra, {'b', 64, 1});
  op.execute = begin_copy;
}

}  // namespace

bool decode_async_copy(Decoder& d) {
  if (d.opcode() != "cp" || !d.has_modifier("async") || d.has_modifier("bulk") ||
      d.has_modifier("mbarrier"))
    return false;
  d.take("async");
  if (d.take("commit_group")) {
    d.op().execute = commit;
  } else if (d.take("wait_group")) {
    decode_wait(d, false);
  } else if (d.take("wait_all")) {
    decode_wait(d, true);
  } else {
    decode_copy(d);
  }
  return true;
}

}  // namespace axonn::gpu_machine
