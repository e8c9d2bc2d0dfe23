// multimem.ld_reduce, multimem.st and multimem.red: accesses to the memory of all devices of a team
// through one multicast address. Source: PTX ISA 9.0, section 9.7.9.15.
#include <algorithm>
#include <array>
#include <cstring>

#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"
#include "gpu_machine/machine.h"
#include "gpu_machine/narrow_float.h"
#include "gpu_machine/strong.h"
#include "gpu_machine/updates.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint32_t kMostBytes = 16;
using Values = std::array<std::byte, kMostBytes>;  // of one lane

// The place on each device, in an order that the adversary draws, since none is promised.
std::vector<Warp::Place> places(const Op& op, Warp& warp, uint32_t bytes, int lane) {
  const uint64_t address = warp.address(op, lane);
  const std::vector<Region*>* team = warp.machine.memory().team_of(address);
  if (team == nullptr) {
    warp.fail(MachineError::Kind::kUndefined, "multimem takes a multicast address", lane);
  }
  const uint64_t offset = address & (window_start(1) - 1);
  std::vector<Warp::Place> all;
  for (Region* region : *team) {
    if (offset + bytes > region->bytes.size() || offset % bytes != 0) {
      warp.fail(MachineError::Kind::kMemory,
                "offset " + std::to_string(offset) + " is misaligned or outside " + region->name,
                lane);
    }
    all.push_back({region, offset, nullptr, kMulticastAlias});
  }
  for (size_t i = all.size(); i > 1; --i) {
    std::swap(all[i - 1], all[warp.machine.draw(static_cast<uint32_t>(i))]);
  }
  return all;
}

uint32_t bytes_of(const Op& op) {
  return static_cast<uint32_t>(op.type.bits * op.type.lanes) / 8 * op.count;
}

Values operand_of(const Op& op, Warp& warp, int lane) {
  Values values{};
  for (uint32_t v = 0; v < op.count; ++v) {
    std::memcpy(values.data() + v * op.register_bytes,
                warp.lanes<std::byte>(op.vector[v]) + lane * op.register_bytes, op.register_bytes);
  }
  return values;
}

// --- How elements are joined ------------------------------------------------------

// Conversions between elements of type T and the type Sum, in which they are combined.
template <typename T, typename Sum>
struct Joined {
  static Sum wide(T value) {
    if constexpr (std::is_arithmetic_v<T>) {
      return static_cast<Sum>(value);
    } else {
      return static_cast<Sum>(value.wide());
    }
  }
  static T stored(Sum value) {
    if constexpr (std::is_arithmetic_v<T>) {
      return static_cast<T>(value);
    } else {
      return narrow<T>(static_cast<double>(value));
    }
  }
  static Sum load(const std::byte* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return wide(value);
  }
  static void store(std::byte* to, Sum value) {
    const T element = stored(value);
    std::memcpy(to, &element, sizeof(T));
  }
};

// Reads and combines the elements of all devices. Sums of 16-bit floats are rounded after each
// addition or, with .acc::f32, only at the end.
template <typename T, typename Sum, bool kRoundsEach>
void load_and_reduce(const Op& op, Warp& warp, uint32_t mask) {
  using Each = Joined<T, Sum>;
  const uint32_t bytes = std::min(bytes_of(op), kMostBytes), elements = bytes / sizeof(T);
  for_each_lane(mask, [&](int i) {
    std::array<Sum, kMostBytes / sizeof(T)> sums{};
    bool is_first = true;
    for (const Warp::Place& at : places(op, warp, bytes, i)) {
      warp.note_read(*at.region, at.offset, bytes, {op.order, op.scope, at.alias}, i);
      for (uint32_t e = 0; e < elements; ++e) {
        T element;
        load_strong(&element, at.region->bytes.data() + at.offset + e * sizeof(T), sizeof(T));
        const Sum value = Each::wide(element);
        sums[e] = is_first ? value : updated<Sum>(op.choice, sums[e], value, Sum{});
        if constexpr (kRoundsEach) {
          Values rounded{};
          Each::store(rounded.data(), sums[e]);
          sums[e] = Each::load(rounded.data());
        }
      }
      is_first = false;
    }
    Values result{};
    for (uint32_t e = 0; e < elements; ++e) {
      Each::store(result.data() + e * sizeof(T), sums[e]);
    }
    for (uint32_t v = 0; v < op.count; ++v) {
      std::memcpy(warp.lanes<std::byte>(op.vector[v]) + i * op.register_bytes,
                  result.data() + v * op.register_bytes, op.register_bytes);
    }
    if (op.order != Order::kWeak) warp.note_poll(warp.address(op, i));
  });
}

template <typename T, typename Sum>
void reduce(const Op& op, Warp& warp, uint32_t mask) {
  using Each = Joined<T, Sum>;
  const uint32_t bytes = std::min(bytes_of(op), kMostBytes), elements = bytes / sizeof(T);
  for_each_lane(mask, [&](int i) {
    const Values values = operand_of(op, warp, i);
    for (const Warp::Place& at : places(op, warp, bytes, i)) {
      warp.note_update(*at.region, at.offset, bytes, {op.order, op.scope, at.alias}, i);
      for (uint32_t e = 0; e < elements; ++e) {
        std::byte* place = at.region->bytes.data() + at.offset + e * sizeof(T);
        const Sum value = Each::load(values.data() + e * sizeof(T));
        update_strong<T>(place, [&](T before) {
          return Each::stored(updated<Sum>(op.choice, Each::wide(before), value, Sum{}));
        });
      }
    }
  });
  warp.machine.note_change();
}

void store(const Op& op, Warp& warp, uint32_t mask) {
  const uint32_t bytes = bytes_of(op), element = std::min<uint32_t>(bytes, op.register_bytes);
  for_each_lane(mask, [&](int i) {
    const Values values = operand_of(op, warp, i);
    for (const Warp::Place& at : places(op, warp, bytes, i)) {
      warp.note_write(*at.region, at.offset, bytes, {op.order, op.scope, at.alias}, i);
      for (uint32_t from = 0; from < bytes; from += element) {
        store_strong(at.region->bytes.data() + at.offset + from, values.data() + from, element);
      }
    }
  });
  warp.machine.note_change();
}

// --- Decoding ---------------------------------------------------------------------

struct Operations {
  Execute load_and_reduce, load_and_sum_wide, reduce;  // load_and_sum_wide is for .acc::f32
};
template <typename T, typename Sum>
Operations operations() {
  return {load_and_reduce<T, Sum, !std::is_same_v<T, Sum>>, load_and_reduce<T, Sum, false>,
          reduce<T, Sum>};
}

Operations operations_of(Type type, uint8_t update) {
  const bool is_bitwise = update == kAnd || update == kOr || update == kXor;
  const bool is_wide = type.bits == 64;
  if (type.letter == 'h') return operations<Brain, float>();
  if (type.letter == 'f') {
    return type.bits == 16 ? operations<Half, float>()
           : is_wide       ? operations<double, double>()
                           : operations<float, float>();
  }
  if (type.is_signed() && !is_bitwise) {
    return is_wide ? operations<int64_t, int64_t>() : operations<int32_t, int32_t>();
  }
  return is_wide ? operations<uint64_t, uint64_t>() : operations<uint32_t, uint32_t>();
}

bool exists(Type type, uint8_t update, bool is_red) {
  const bool compares = update == kMin || update == kMax;
  if (type.is_float()) return update == kAdd || (compares && type.bits == 16 && !is_red);
  if (type.bits != 32 && type.bits != 64) return false;
  if (type.letter == 'b') return update == kAnd || update == kOr || update == kXor;
  if (update == kAdd) return type.bits == 32 || type.letter == 'u';
  return compares;
}

void take_values(Decoder& d, size_t index) {
  Op& op = d.op();
  op.register_bytes = static_cast<uint8_t>(op.type.register_bytes());
  const Operand& values = d.operand(index);
  const std::vector<Operand> parts =
      values.kind == Operand::Kind::kVector ? values.parts : std::vector<Operand>{values};
  if (parts.size() != op.count) d.fail("the vector has another length");
  for (size_t i = 0; i < parts.size(); ++i) op.vector[i] = d.slot(parts[i], op.type);
}

void take_type_and_vector(Decoder& d) {
  Op& op = d.op();
  const std::string vector = d.take_one({"v2", "v4", "v8"});
  op.count = vector.empty() ? 1 : static_cast<uint8_t>(vector[1] - '0');
  op.type = d.take_type();
  const uint32_t bytes = bytes_of(op);
  const bool may_be_vector = op.type.is_float() && op.type.bits != 64;
  if ((op.count > 1 && !may_be_vector) || (bytes != 4 && bytes != 8 && bytes != 16)) {
    d.fail("the machine does not know this vector of this type");
  }
}

uint8_t take_update(Decoder& d) {
  const std::string name = d.take_one({"add", "min", "max", "and", "or", "xor"});
  if (name.empty()) d.fail("the machine does not know this reduction");
  return update_of(name);
}

}  // namespace

bool decode_multimem(Decoder& d) {
  if (d.opcode() != "multimem") return false;
  Op& op = d.op();
  const std::string what = d.take_one({"ld_reduce", "st", "red"});
  if (what.empty()) d.fail("the machine does not know this operation");
  if (what == "red") {
    op.order = Order::kRelaxed;
    if (d.has_modifier("weak")) d.fail("a reduction is not weak");
  }
  d.take_order_and_scope();
  const bool is_allowed = op.order == Order::kRelaxed || op.order == Order::kWeak ||
                          op.order == (what == "ld_reduce" ? Order::kAcquire : Order::kRelease);
  if (!is_allowed) d.fail("there is no such order of this operation");
  if (op.order != Order::kWeak && op.scope == Scope::kNone) op.scope = Scope::kGpu;
  const Space space = take_space(d);
  if (space != Space::kGlobal && space != Space::kGeneric) d.fail("expected global memory");
  const bool reduces = what != "st";
  if (reduces) op.choice = take_update(d);
  const bool sums_wide = d.take("acc::f32");
  take_type_and_vector(d);
  if (reduces && !exists(op.type, op.choice, what == "red")) {
    d.fail("there is no such reduction of this type");
  }
  if (sums_wide && (what != "ld_reduce" || !op.type.is_float() || op.type.bits != 16)) {
    d.fail(".acc::f32 is for sums of 16-bit floats that are loaded");
  }
  const bool loads = what == "ld_reduce";
  take_values(d, loads ? 0 : 1);
  op.at = d.address(loads ? 1 : 0, space);
  const Operations by_type = operations_of(op.type, op.choice);
  op.execute = what == "st"    ? store
               : what == "red" ? by_type.reduce
               : sums_wide     ? by_type.load_and_sum_wide
                               : by_type.load_and_reduce;
  if (loads && op.order != Order::kWeak) op.flow = Flow::kYield;
  return true;
}

}  // namespace axonn::gpu_machine
