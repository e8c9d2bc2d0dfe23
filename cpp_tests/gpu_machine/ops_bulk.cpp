// Bulk copies, copies of boxes of tensors, and groups of such copies. Source: PTX ISA 9.0, sections
// 9.7.9.25 to 9.7.9.28.
#include "gpu_machine/bulk.h"
#include "gpu_machine/bulk_issue.h"
#include "gpu_machine/decoder.h"

namespace axonn::gpu_machine {
namespace {

void do_nothing(const Op&, Warp&, uint32_t) {}

const Type kWord{'u', 32, 1}, kPolicy{'b', 64, 1};

// [map, {x, y}]: stores the coordinates and returns the descriptor's address.
Address decode_tensor(Decoder& d, size_t index) {
  Op& op = d.op();
  Operand what = d.operand(index);
  if (what.kind != Operand::Kind::kAddress || what.parts.size() != 1) {
    d.fail("expected [descriptor, {coordinates}]");
  }
  const Operand place = what.parts[0];
  const std::vector<Operand> parts =
      place.kind == Operand::Kind::kVector ? place.parts : std::vector<Operand>{place};
  if (parts.size() != op.count) d.fail("expected a coordinate for each dim");
  for (size_t i = 0; i < parts.size(); ++i) op.vector[i] = d.slot(parts[i], {'s', 32, 1});
  what.parts.clear();
  return d.address(what, Space::kGeneric);
}

void take_tensor(Decoder& d) {
  Op& op = d.op();
  op.choice |= kTensor;
  const std::string dims = d.take_one({"1d", "2d", "3d", "4d", "5d"});
  if (dims.empty()) d.fail("expected a number of dims");
  op.count = static_cast<uint8_t>(dims[0] - '0');
  d.take("tile");
}

TensorType type_of_reduction(Decoder& d, Update update) {
  d.take("noftz");
  const Type type = d.take_type();
  const bool is_bitwise = update == kAnd || update == kOr || update == kXor;
  if (type.letter == 'h') return TensorType::kBFloat16;
  if (type.letter == 'f') {
    return type.bits == 16   ? TensorType::kFloat16
           : type.bits == 32 ? TensorType::kFloat32
                             : TensorType::kFloat64;
  }
  const bool is_signed = type.is_signed() && !is_bitwise;
  if (type.bits == 64) return is_signed ? TensorType::kInt64 : TensorType::kUint64;
  if (type.bits != 32) return TensorType::kUint8;  // unsupported
  return is_signed ? TensorType::kInt32 : TensorType::kUint32;
}

void take_reduction(Decoder& d) {
  Op& op = d.op();
  op.choice |= kReduces;
  const std::string name = d.take_one({"add", "min", "max", "inc", "dec", "and", "or", "xor"});
  const Update update = update_of(name);
  if (name.empty()) d.fail("the machine does not know this reduction");
  op.register_bytes = update;
  if ((op.choice & kTensor) == 0) {
    const TensorType type = type_of_reduction(d, update);
    if (!is_supported({update, type})) d.fail("there is no such reduction of this type");
    op.source_bytes = static_cast<uint8_t>(type);
  }
}

void decode_prefetch(Decoder& d) {
  if (!d.take("L2")) d.fail("expected .L2");
  const bool has_policy = d.take("L2::cache_hint");
  size_t next = 1;
  if (d.take("tensor")) {
    take_tensor(d);
    d.take("global");
    decode_tensor(d, 0);
  } else {
    d.take("global");
    d.address(0, Space::kGlobal);
    d.slot(next++, kWord);
  }
  if (has_policy) d.slot(next, kPolicy);
  d.op().execute = do_nothing;
}

void decode_groups(Decoder& d, bool waits) {
  Op& op = d.op();
  op.execute = bulk_issue::commit;
  if (!waits) return;
  op.choice = d.take("read") ? 1 : 0;
  op.target = static_cast<uint32_t>(d.operand(0).bits);
  op.flow = Flow::kWait;
  op.ready = bulk_issue::are_groups_ready;
  op.execute = bulk_issue::learn_of_groups;
}

void decode_copy(Decoder& d, bool reduces) {
  Op& op = d.op();
  if (d.take("tensor")) take_tensor(d);
  if (reduces) take_reduction(d);
  const bool is_tensor = (op.choice & kTensor) != 0;
  const bool has_policy = d.take("L2::cache_hint");
  // The target's state space comes first.
  const std::string to = d.take_one({"shared::cluster"});
  const bool from_global = d.take("global");
  const std::string own = d.take_one({"shared::cta"});
  size_t next = 2;
  if (d.take("bulk_group")) {
    if (!to.empty() || !from_global || own.empty()) d.fail("expected .global.shared::cta");
    op.at = is_tensor ? decode_tensor(d, 0) : d.address(0, Space::kGlobal);
    op.from = d.address(1, Space::kShared);
    op.execute = bulk_issue::store;
  } else {
    if (!d.take("mbarrier::complete_tx::bytes")) d.fail("expected how it completes");
    const bool is_own = to.empty();  // .shared::cta.global
    if (is_own ? !from_global || own.empty() : from_global != own.empty()) {
      d.fail("the machine does not know these spaces");
    }
    if (!from_global) op.choice |= kFromShared;
    op.at = d.address(0, is_own ? Space::kShared : Space::kSharedCluster);
    op.from = is_tensor ? decode_tensor(d, 1)
                        : d.address(1, from_global ? Space::kGlobal : Space::kShared);
    op.execute = bulk_issue::load;
    if (d.take("multicast::cluster")) op.choice |= kMulticast;
  }
  if (!is_tensor) op.b = d.slot(next++, kWord);
  if (op.execute == bulk_issue::load) {
    op.signal = d.address(next++, Space::kSharedCluster);
    if ((op.choice & kMulticast) != 0) op.e = d.slot(next++, {'u', 16, 1});
  }
  if (has_policy) d.slot(next, kPolicy);
}

}  // namespace

bool decode_bulk(Decoder& d) {
  if (d.opcode() != "cp" || !d.has_modifier("bulk")) return false;
  const bool reduces = d.take("reduce");
  if (!d.take("async") || !d.take("bulk")) d.fail("expected .async.bulk");
  if (d.take("prefetch")) {
    decode_prefetch(d);
  } else if (d.take("commit_group")) {
    decode_groups(d, false);
  } else if (d.take("wait_group")) {
    decode_groups(d, true);
  } else {
    decode_copy(d, reduces);
  }
  return true;
}

}  // namespace axonn::gpu_machine
