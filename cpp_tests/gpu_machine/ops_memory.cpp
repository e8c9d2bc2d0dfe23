// Loads, stores, atomic operations and fences. Source: PTX ISA 9.0, sections 9.7.9 and 9.7.13.
#include <cstring>

#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"
#include "gpu_machine/machine.h"
#include "gpu_machine/narrow_float.h"
#include "gpu_machine/strong.h"
#include "gpu_machine/updates.h"

namespace axonn::gpu_machine {
namespace {

void load(const Op& op, Warp& warp, uint32_t mask) {
  const uint32_t element = static_cast<uint32_t>(op.type.bits) / 8;
  const bool is_strong = op.order != Order::kWeak && element <= sizeof(uint64_t);
  for_each_lane(mask, [&](int i) {
    const std::byte* from = warp.read(op, warp.address(op, i), element * op.count, i);
    for (uint32_t v = 0; v < op.count; ++v) {
      uint64_t bits = 0;
      if (is_strong) {
        load_strong(&bits, from + v * element, element);
      } else {
        std::memcpy(&bits, from + v * element, element);
      }
      if (op.type.is_signed() && element < op.register_bytes) {
        const int unused = 64 - op.type.bits;
        bits = static_cast<uint64_t>(static_cast<int64_t>(bits << unused) >> unused);
      }
      std::memcpy(warp.lanes<std::byte>(op.vector[v]) + i * op.register_bytes, &bits,
                  op.register_bytes);
    }
  });
}

void store(const Op& op, Warp& warp, uint32_t mask) {
  const uint32_t element = static_cast<uint32_t>(op.type.bits) / 8;
  const bool is_strong = op.order != Order::kWeak && element <= sizeof(uint64_t);
  for_each_lane(mask, [&](int i) {
    std::byte* to = warp.write(op, warp.address(op, i), element * op.count, i);
    for (uint32_t v = 0; v < op.count; ++v) {
      const std::byte* from = warp.lanes<std::byte>(op.vector[v]) + i * op.register_bytes;
      if (std::memcmp(to + v * element, from, element) != 0) warp.machine.note_change();
      if (is_strong) {
        store_strong(to + v * element, from, element);
      } else {
        std::memcpy(to + v * element, from, element);
      }
    }
  });
}

// Lanes with the same address run one after the other, starting with a random one.
template <typename T>
void atomic(const Op& op, Warp& warp, uint32_t mask) {
  const auto first = static_cast<int>(warp.machine.draw(kLanes));
  for (int step = 0; step < kLanes; ++step) {
    const int i = (first + step) % kLanes;
    if ((mask >> i & 1u) == 0) continue;
    const uint32_t owed = warp.lanes_that_owe_host();
    std::byte* place = warp.update(op, warp.address(op, i), sizeof(T), i);
    const T b = warp.lanes<T>(op.b)[i];
    const T c = op.choice == kCompare ? warp.lanes<T>(op.c)[i] : T{};
    const auto change = [&](T before) { return updated<T>(op.choice, before, b, c); };
    const T old = update_strong<T>(place, change);
    const T now = change(old);
    if (std::memcmp(&now, &old, sizeof(T)) != 0) {
      warp.machine.note_change();
    } else if (op.choice == kCompare) {
      warp.forget_host_write(i, owed);
    }
    if (op.register_bytes != 0) warp.lanes<T>(op.d)[i] = old;
  }
}

// 16-bit additions, one or two at a time.
template <typename T>
void atomic_add_narrow(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) {
    const auto bytes = static_cast<uint32_t>(op.type.register_bytes());
    std::byte* place = warp.update(op, warp.address(op, i), bytes, i);
    for (int part = 0; part < op.type.lanes; ++part) {
      const T b = warp.lanes<T>(op.b)[i * op.type.lanes + part];
      const T old = update_strong<T>(place + 2 * part,
                                     [&](T before) { return narrow<T>(before.wide() + b.wide()); });
      if (op.register_bytes != 0) warp.lanes<T>(op.d)[i * op.type.lanes + part] = old;
    }
    warp.machine.note_change();
  });
}

void do_nothing(const Op&, Warp&, uint32_t) {}

// Removes cache hints, which do not change results.
void take_cache_hints(Decoder& d) {
  d.take_one({"ca", "cg", "cs", "lu", "cv", "wb", "wt"});
  d.take_one({"L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last",
              "L1::no_allocate"});
  d.take_one({"L2::64B", "L2::128B", "L2::256B"});
  d.take("nc");
}

void decode_access(Decoder& d, bool loads) {
  Op& op = d.op();
  d.take_order_and_scope();
  const Space space = take_space(d);
  take_cache_hints(d);
  const std::string vector = d.take_one({"v2", "v4", "v8"});
  op.count = vector.empty() ? 1 : static_cast<uint8_t>(vector[1] - '0');
  op.type = d.take_type();
  if (op.type.lanes != 1) d.fail("the machine does not load packed types by this name");
  if (op.type.bits / 8 * op.count > 32) d.fail("an access has at most 32 bytes");
  op.at = d.address(loads ? 1 : 0, space);
  const Operand& values = d.operand(loads ? 0 : 1);
  const bool is_vector = values.kind == Operand::Kind::kVector;
  const std::vector<Operand> parts = is_vector ? values.parts : std::vector<Operand>{values};
  if (parts.size() != op.count) d.fail("the vector has another length");
  for (size_t i = 0; i < parts.size(); ++i) {
    uint8_t bytes = 0;
    if (d.is_register(parts[i]) || (loads && parts[i].name == "_")) {
      op.vector[i] = d.any_register(parts[i], &bytes);
    } else {
      bytes = static_cast<uint8_t>(op.type.register_bytes());
      op.vector[i] = d.slot(parts[i], op.type);
    }
    if (bytes * 8 < op.type.bits) d.fail("a register is narrower than the type");
    if (parts[i].name != "_" || i == 0) op.register_bytes = bytes;
    if (parts[i].name != "_" && bytes != op.register_bytes) d.fail("registers differ in width");
  }
  op.execute = loads ? load : store;
  if (loads && op.order != Order::kWeak) op.flow = Flow::kYield;
}

Execute atomic_of(Type type, uint8_t update) {
  const bool bitwise = update == kAnd || update == kOr || update == kXor;
  const bool counts = update == kIncrement || update == kDecrement;
  if (type.letter == 'h' || (type.letter == 'f' && type.bits == 16)) {
    if (update != kAdd) return nullptr;
    return type.letter == 'h' ? atomic_add_narrow<Brain> : atomic_add_narrow<Half>;
  }
  if (type.letter == 'f') {
    if (update != kAdd) return nullptr;
    return type.bits == 32 ? atomic<float> : atomic<double>;
  }
  if (counts && (type.letter != 'u' || type.bits != 32)) return nullptr;
  if (type.bits == 16)
    return update == kCompare || update == kExchange ? atomic<uint16_t> : nullptr;
  const bool is_signed = type.is_signed() && !bitwise;
  if (type.bits == 32) return is_signed ? atomic<int32_t> : atomic<uint32_t>;
  if (type.bits == 64) return is_signed ? atomic<int64_t> : atomic<uint64_t>;
  return nullptr;
}

}  // namespace

Space take_space(Decoder& d) {
  const std::string space =
      d.take_one({"param", "global", "shared", "shared::cta", "shared::cluster", "local", "const",
                  "param::entry", "param::func"});
  if (space == "shared::cluster") return Space::kSharedCluster;
  if (space.starts_with("shared")) return Space::kShared;
  if (space.starts_with("param")) return Space::kParam;
  return space == "global"  ? Space::kGlobal
         : space == "local" ? Space::kLocal
         : space == "const" ? Space::kConst
                            : Space::kGeneric;
}

bool decode_memory(Decoder& d) {
  const std::string opcode = d.opcode();
  if (opcode == "ld" || opcode == "ldu") {
    decode_access(d, true);
  } else if (opcode == "st") {
    decode_access(d, false);
  } else if (opcode == "prefetch") {
    const Space space = take_space(d);
    if (!d.take("tensormap") && d.take_one({"L1", "L2"}).empty()) d.fail("expected a cache");
    d.address(0, space);
    d.op().execute = do_nothing;
  } else {
    return false;
  }
  return true;
}

bool decode_atomic(Decoder& d) {
  if (d.opcode() != "atom" && d.opcode() != "red") return false;
  Op& op = d.op();
  const bool returns = d.opcode() == "atom";
  op.order = Order::kRelaxed;
  op.scope = Scope::kGpu;
  d.take_order_and_scope();
  const Space space = take_space(d);
  d.take("noftz");
  const std::string update =
      d.take_one({"add", "exch", "cas", "and", "or", "xor", "min", "max", "inc", "dec"});
  op.choice = update_of(update);
  if (update.empty()) d.fail("the machine does not know this operation");
  op.type = d.take_type();
  op.execute = atomic_of(op.type, op.choice);
  if (op.execute == nullptr) d.fail("there is no such operation of this type");
  op.flow = Flow::kYield;
  if (returns) {
    uint8_t bytes = 0;
    const bool is_wanted = d.operand(0).name != "_";
    op.d = is_wanted ? d.slot(0, op.type) : d.any_register(d.operand(0), &bytes);
    op.register_bytes = static_cast<uint8_t>(op.type.register_bytes());
  }
  const size_t first = returns ? 1 : 0;
  op.at = d.address(first, space);
  op.b = d.slot(first + 1, op.type);
  if (op.choice == kCompare) op.c = d.slot(first + 2, op.type);
  return true;
}

}  // namespace axonn::gpu_machine
