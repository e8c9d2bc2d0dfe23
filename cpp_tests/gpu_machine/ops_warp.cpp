// Operations across a warp's lanes. Source: PTX ISA 9.0, sections 9.7.9.6 (shfl) and 9.7.13.
#include <algorithm>
#include <bit>

#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"

namespace axonn::gpu_machine {
namespace {

enum Shuffle : uint8_t { kUp, kDown, kButterfly, kIndex };
enum Vote : uint8_t { kAll, kAny, kUniform, kBallot };
enum Reduction : uint8_t { kAdd, kMin, kMax, kAnd, kOr, kXor };

void shuffle(const Op& op, Warp& warp, uint32_t mask) {
  uint32_t values[kLanes];
  std::memcpy(values, warp.lanes<uint32_t>(op.a), sizeof(values));
  for_each_lane(mask, [&](int lane) {
    const uint32_t b = warp.lanes<uint32_t>(op.b)[lane] & 31u;
    const uint32_t c = warp.lanes<uint32_t>(op.c)[lane];
    const uint32_t clamp = c & 31u, segment = c >> 8 & 31u;
    const auto i = static_cast<uint32_t>(lane);
    const uint32_t most = (i & segment) | (clamp & ~segment), least = i & segment;
    uint32_t source = i;
    bool is_inside = true;
    if (op.choice == kUp) {
      source = i - b;
      is_inside = static_cast<int>(source) >= static_cast<int>(most);
    } else {
      source = op.choice == kDown        ? i + b
               : op.choice == kButterfly ? i ^ b
                                         : (least | (b & ~segment));
      is_inside = source <= most;
    }
    if (!is_inside) source = i;
    if ((mask >> source & 1u) == 0) {
      warp.fail(MachineError::Kind::kUndefined,
                "reads lane " + std::to_string(source) + ", which does not take part", lane);
    }
    warp.lanes<uint32_t>(op.d)[lane] = values[source];
    if (op.has_count) store_predicate(warp, op.d2, is_inside ? kAllLanes : 0, 1u << lane);
  });
}

void vote(const Op& op, Warp& warp, uint32_t mask) {
  const uint32_t votes = (warp.predicate(op.a) ^ op.negated) & mask;
  if (op.choice == kBallot) {
    for_each_lane(mask, [&](int i) { warp.lanes<uint32_t>(op.d)[i] = votes; });
    return;
  }
  const bool result = op.choice == kAll   ? votes == mask
                      : op.choice == kAny ? votes != 0
                                          : votes == mask || votes == 0;
  store_predicate(warp, op.d, result ? kAllLanes : 0, mask);
}

template <typename T>
void match(const Op& op, Warp& warp, uint32_t mask) {
  const T* values = warp.lanes<T>(op.a);
  uint32_t equal[kLanes] = {};
  for_each_lane(mask, [&](int i) {
    for_each_lane(mask, [&](int j) { equal[i] |= uint32_t{values[i] == values[j]} << j; });
  });
  for_each_lane(mask, [&](int i) {
    const bool all = equal[i] == mask;
    warp.lanes<uint32_t>(op.d)[i] = op.choice == kAll && !all ? 0 : equal[i];
    if (op.has_count) store_predicate(warp, op.d2, all ? kAllLanes : 0, 1u << i);
  });
}

template <typename T>
void reduce(const Op& op, Warp& warp, uint32_t mask) {
  const T* values = warp.lanes<T>(op.a);
  T total = values[std::countr_zero(mask)];
  for_each_lane(mask & (mask - 1), [&](int i) {
    const T value = values[i];
    total = op.choice == kAdd
                ? static_cast<T>(static_cast<uint32_t>(total) + static_cast<uint32_t>(value))
            : op.choice == kMin ? std::min(total, value)
            : op.choice == kMax ? std::max(total, value)
            : op.choice == kAnd ? total & value
            : op.choice == kOr  ? total | value
                                : total ^ value;
  });
  for_each_lane(mask, [&](int i) { warp.lanes<T>(op.d)[i] = total; });
}

void elect(const Op& op, Warp& warp, uint32_t mask) {
  const auto leader = static_cast<uint32_t>(std::countr_zero(mask));
  for_each_lane(mask, [&](int i) { warp.lanes<uint32_t>(op.d)[i] = leader; });
  store_predicate(warp, op.d2, 1u << leader, mask);
}

void active_mask(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) { warp.lanes<uint32_t>(op.d)[i] = mask; });
}

void meet_all(const Op&, Warp& warp, uint32_t mask) { warp.meet_lanes(mask); }

const Type kWord{'b', 32, 1};

// d|p, or only d.
void decode_results(Decoder& d) {
  Op& op = d.op();
  const Operand& result = d.operand(0);
  if (result.kind != Operand::Kind::kVector) {
    op.d = d.slot(0, kWord);
    return;
  }
  uint8_t unused = 0;
  op.d = result.parts[0].name == "_" ? d.any_register(result.parts[0], &unused)
                                     : d.slot(result.parts[0], kWord);
  op.d2 = d.slot(result.parts[1], {'p', 1, 1});
  op.has_count = true;
}

void meet(Decoder& d, size_t members) {
  Op& op = d.op();
  if (!d.take("sync")) d.fail("the machine knows only the form with .sync");
  op.flow = Flow::kMeet;
  op.members = d.slot(members, kWord);
}

void decode_shuffle(Decoder& d) {
  Op& op = d.op();
  const std::string mode = d.take_one({"up", "down", "bfly", "idx"});
  if (mode.empty()) d.fail("expected a mode");
  op.choice = mode == "up" ? kUp : mode == "down" ? kDown : mode == "bfly" ? kButterfly : kIndex;
  meet(d, 4);
  d.take_type();
  decode_results(d);
  op.a = d.slot(1, kWord);
  op.b = d.slot(2, kWord);
  op.c = d.slot(3, kWord);
  op.execute = shuffle;
}

void decode_vote(Decoder& d) {
  Op& op = d.op();
  const std::string mode = d.take_one({"all", "any", "uni", "ballot"});
  if (mode.empty()) d.fail("expected a mode");
  op.choice = mode == "all" ? kAll : mode == "any" ? kAny : mode == "uni" ? kUniform : kBallot;
  meet(d, 2);
  d.take_type();
  op.d = op.choice == kBallot ? d.slot(0, kWord) : d.slot(0, {'p', 1, 1});
  op.a = d.predicate(1);
  op.execute = vote;
}

void decode_reduction(Decoder& d) {
  Op& op = d.op();
  const std::string mode = d.take_one({"add", "min", "max", "and", "or", "xor"});
  op.choice = mode == "add"   ? kAdd
              : mode == "min" ? kMin
              : mode == "max" ? kMax
              : mode == "and" ? kAnd
              : mode == "or"  ? kOr
                              : kXor;
  if (mode.empty()) d.fail("expected an operation");
  meet(d, 2);
  const Type type = d.take_type();
  if (type.bits != 32 || type.is_float()) d.fail("the machine reduces integers of 32 bits");
  op.d = d.slot(0, type);
  op.a = d.slot(1, type);
  op.execute = type.is_signed() ? reduce<int32_t> : reduce<uint32_t>;
}

}  // namespace

bool decode_warp(Decoder& d) {
  Op& op = d.op();
  const std::string opcode = d.opcode();
  if (opcode == "shfl") {
    decode_shuffle(d);
  } else if (opcode == "vote") {
    decode_vote(d);
  } else if (opcode == "redux") {
    decode_reduction(d);
  } else if (opcode == "match") {
    op.choice = d.take("all") ? kAll : kAny;
    if (op.choice == kAny && !d.take("any")) d.fail("expected .all or .any");
    meet(d, 2);
    const Type type = d.take_type();
    decode_results(d);
    op.a = d.slot(1, type);
    op.execute = type.bits == 64 ? match<uint64_t> : match<uint32_t>;
  } else if (opcode == "elect") {
    meet(d, 1);
    decode_results(d);
    if (!op.has_count) d.fail("expected d|p");
    op.execute = elect;
  } else if (opcode == "activemask") {
    d.take_type();
    op.d = d.slot(0, kWord);
    op.execute = active_mask;
  } else if (opcode == "bar" && d.take("warp")) {
    meet(d, 0);
    op.execute = meet_all;
    op.meets_anywhere = true;
  } else {
    return false;
  }
  return true;
}

}  // namespace axonn::gpu_machine
