// st.async and red.async: a lane's store to shared memory of the cluster, or reduction there, which
// happens later and signals an mbarrier in the same CTA. Source: PTX ISA 9.0, sections 9.7.9.12 and
// 9.7.13.10.
#include <array>
#include <cstring>

#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"
#include "gpu_machine/machine.h"
#include "gpu_machine/updates.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint32_t kMostBytes = 32;  // .v4.b64

using Bytes32 = std::array<std::byte, kMostBytes>;
// Combines an operand with the value at a place.
using Join = void (*)(uint8_t update, std::byte* place, const std::byte* operand);

template <typename T>
void join(uint8_t update, std::byte* place, const std::byte* operand) {
  T old, value;
  std::memcpy(&old, place, sizeof(T));
  std::memcpy(&value, operand, sizeof(T));
  old = updated<T>(update, old, value, T{});
  std::memcpy(place, &old, sizeof(T));
}

Join join_of(Type type) {
  if (type.bits == 64) return join<uint64_t>;
  return type.is_signed() ? join<int32_t> : join<uint32_t>;
}

// Both use the generic proxy. The store is weak, the reduction is relaxed in the cluster, and the
// signal is a release in the cluster, like that of a bulk copy.
class AsyncStore final : public AsyncOperation {
 public:
  AsyncStore(const Op& op, Warp& issuer, int lane, const Warp::Place& to, uint64_t mbarrier,
             const Bytes32& values, uint32_t bytes)
      : AsyncOperation(issuer, lane, Proxy::kGeneric,
                       {static_cast<uint64_t>(to.cta->id), mbarrier}),
        to_(to),
        mbarrier_(mbarrier),
        values_(values),
        bytes_(bytes),
        update_(op.choice),
        type_(op.type) {}

  void step() override {
    const auto found = to_.cta->mbarriers.find(mbarrier_);
    if (found == to_.cta->mbarriers.end()) {
      fail(MachineError::Kind::kUndefined,
           "signals where there is no mbarrier, at shared memory + " + std::to_string(mbarrier_));
    }
    found->second.check_initialized(*this, false, -1);
    std::byte* place = to_.region->bytes.data() + to_.offset;
    if (update_ == kExchange) {
      note_write(*to_.region, to_.offset, bytes_, {}, -1);
      std::memcpy(place, values_.data(), bytes_);
    } else {
      note_update(*to_.region, to_.offset, bytes_, {Order::kRelaxed, Scope::kCluster}, -1);
      join_of(type_)(update_, place, values_.data());
    }
    reach(Stage::kDone);
    found->second.complete(*this, bytes_, seen_at(Stage::kDone));
  }
  bool uses(const Cta& cta) const override { return &cta == to_.cta; }

 private:
  const Warp::Place to_;
  const uint64_t mbarrier_;
  const Bytes32 values_;
  const uint32_t bytes_;
  const uint8_t update_;
  const Type type_;
};

Warp::Place shared_place(Warp& warp, const Address& address, uint32_t bytes, int lane) {
  const Warp::Place at = warp.place(warp.address(address, lane), bytes, bytes, lane);
  if (at.cta == nullptr) {
    warp.fail(MachineError::Kind::kUndefined, "expected an address in shared memory", lane);
  }
  return at;
}

// An Op's `choice` is the update; a plain store is an exchange.
void begin(const Op& op, Warp& warp, uint32_t mask) {
  const uint32_t element = static_cast<uint32_t>(op.type.bits) / 8, bytes = element * op.count;
  for_each_lane(mask, [&](int i) {
    const Warp::Place to = shared_place(warp, op.at, bytes, i);
    const Warp::Place signal = shared_place(warp, op.signal, kMBarrierBytes, i);
    if (to.cta != signal.cta) {
      warp.fail(MachineError::Kind::kUndefined,
                "the mbarrier lies in another CTA's shared memory than the target", i);
    }
    Bytes32 values{};
    for (uint32_t v = 0; v < op.count; ++v) {
      const auto at = static_cast<size_t>(i) * op.register_bytes;
      std::memcpy(values.data() + v * element, warp.lanes<std::byte>(op.vector[v]) + at, element);
    }
    warp.machine.async().begin(
        std::make_shared<AsyncStore>(op, warp, i, to, signal.offset, values, bytes));
  });
}

// The operands [a], b, [mbar].
void decode_operands(Decoder& d) {
  Op& op = d.op();
  if (!d.take("shared::cluster")) d.fail("the machine knows .shared::cluster alone");
  if (!d.take("mbarrier::complete_tx::bytes")) d.fail("expected how it completes");
  op.at = d.address(0, Space::kSharedCluster);
  const Operand& values = d.operand(1);
  const std::vector<Operand> parts =
      values.kind == Operand::Kind::kVector ? values.parts : std::vector<Operand>{values};
  if (parts.size() != op.count) d.fail("the vector has another length");
  for (size_t i = 0; i < parts.size(); ++i) op.vector[i] = d.slot(parts[i], op.type);
  op.register_bytes = static_cast<uint8_t>(op.type.register_bytes());
  op.signal = d.address(2, Space::kSharedCluster);
  op.execute = begin;
}

void decode_reduction(Decoder& d) {
  Op& op = d.op();
  if (!d.take("relaxed") || !d.take("cluster")) d.fail("expected .relaxed.cluster");
  const std::string name = d.take_one({"add", "min", "max", "inc", "dec", "and", "or", "xor"});
  op.type = d.take_type();
  op.choice = update_of(name);
  const bool is_bitwise = op.choice == kAnd || op.choice == kOr || op.choice == kXor;
  const bool counts = op.choice == kIncrement || op.choice == kDecrement;
  const bool is_known =
      is_bitwise           ? op.type.letter == 'b' && op.type.bits == 32
      : counts             ? op.type.letter == 'u' && op.type.bits == 32
      : op.type.bits == 64 ? op.type.letter == 'u' && op.choice == kAdd
                           : op.type.bits == 32 && (op.type.letter == 'u' || op.type.letter == 's');
  if (name.empty() || !is_known) d.fail("there is no such reduction of this type");
}

}  // namespace

bool decode_async_store(Decoder& d) {
  if ((d.opcode() != "st" && d.opcode() != "red") || !d.has_modifier("async")) return false;
  d.take("async");
  Op& op = d.op();
  if (d.opcode() == "red") {
    decode_reduction(d);
  } else {
    op.choice = kExchange;
    d.take("weak");
    const std::string vector = d.take_one({"v2", "v4"});
    op.count = vector.empty() ? 1 : static_cast<uint8_t>(vector[1] - '0');
    op.type = d.take_type();
    if (op.type.lanes != 1 || (op.type.bits != 32 && op.type.bits != 64)) {
      d.fail("st.async stores elements of 32 or 64 bits");
    }
  }
  decode_operands(d);
  return true;
}

}  // namespace axonn::gpu_machine
