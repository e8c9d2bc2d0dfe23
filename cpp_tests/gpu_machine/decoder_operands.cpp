// Operands: their slots in a warp, and their kinds.
#include <algorithm>
#include <bit>
#include <set>

#include "gpu_machine/decoder.h"
#include "gpu_machine/memory.h"

namespace axonn::gpu_machine {
namespace {

const std::set<std::string_view> kSpecials = {"%tid.x",
                                              "%tid.y",
                                              "%tid.z",
                                              "%ntid.x",
                                              "%ntid.y",
                                              "%ntid.z",
                                              "%ctaid.x",
                                              "%ctaid.y",
                                              "%ctaid.z",
                                              "%nctaid.x",
                                              "%nctaid.y",
                                              "%nctaid.z",
                                              "%laneid",
                                              "%warpid",
                                              "%nwarpid",
                                              "%lanemask_eq",
                                              "%lanemask_lt",
                                              "%lanemask_le",
                                              "%lanemask_gt",
                                              "%lanemask_ge",
                                              "%dynamic_smem_size",
                                              "%cluster_ctaid.x",
                                              "%cluster_ctaid.y",
                                              "%cluster_ctaid.z",
                                              "%cluster_nctaid.x",
                                              "%cluster_nctaid.y",
                                              "%cluster_nctaid.z",
                                              "%clusterid.x",
                                              "%clusterid.y",
                                              "%clusterid.z",
                                              "%nclusterid.x",
                                              "%nclusterid.y",
                                              "%nclusterid.z",
                                              "%cluster_ctarank",
                                              "%cluster_nctarank"};

}  // namespace

const Operand& Decoder::operand(size_t index) {
  if (index >= num_operands()) fail("an operand is missing");
  used_operands_ = std::max(used_operands_, index + 1);
  return instruction_->operands[index];
}

Slot Decoder::allocate(int lane_bytes) {
  const Slot place = program_.register_bytes;
  program_.register_bytes = static_cast<uint32_t>(
      align_up(place + static_cast<uint64_t>(lane_bytes) * kLanes, kRegisterAlignment));
  return place;
}

Slot Decoder::constant(uint64_t bits, int bytes) {
  if (bytes < 8) bits &= (uint64_t{1} << (8 * bytes)) - 1;
  const auto [entry, is_new] = immediates_.try_emplace({bits, bytes}, 0);
  if (is_new) {
    entry->second = allocate(bytes);
    program_.constants.push_back({entry->second, bytes, Constant::Kind::kImmediate, bits, ""});
  }
  return entry->second;
}

Slot Decoder::special(const std::string& name, int bytes) {
  const auto [entry, is_new] = specials_.try_emplace({name, bytes}, 0);
  if (is_new) {
    entry->second = allocate(bytes);
    program_.constants.push_back({entry->second, bytes, Constant::Kind::kSpecial, 0, name});
  }
  return entry->second;
}

std::optional<uint64_t> Decoder::address_of(const std::string& name) const {
  const auto found = symbols_.find(name);
  if (found == symbols_.end()) return std::nullopt;
  return found->second;
}

bool Decoder::is_register(const Operand& operand) const {
  return operand.kind == Operand::Kind::kName && kernel_.registers.contains(operand.name);
}

bool Decoder::is_predicate(size_t index) const {
  const auto found = kernel_.registers.find(instruction_->operands.at(index).name);
  return found != kernel_.registers.end() && found->second.letter == 'p';
}

bool Decoder::is_address(size_t index) const {
  return instruction_->operands.at(index).kind == Operand::Kind::kAddress;
}

bool Decoder::is_sink(size_t index) const { return instruction_->operands.at(index).name == "_"; }

Slot Decoder::slot(const Operand& operand, Type type) {
  const int bytes = type.register_bytes();
  if (operand.kind == Operand::Kind::kImmediate) {
    uint64_t bits = operand.bits;
    if (operand.letter == 'f' && bytes == 4) {
      bits = std::bit_cast<uint32_t>(static_cast<float>(std::bit_cast<double>(bits)));
    }
    return constant(bits, bytes);
  }
  if (operand.kind != Operand::Kind::kName) fail("expected a register or a number");
  const auto declared = kernel_.registers.find(operand.name);
  if (declared != kernel_.registers.end()) {
    const int has = declared->second.register_bytes();
    if (has != bytes || (declared->second.letter == 'p') != (type.letter == 'p')) {
      fail("'" + operand.name + "' has " + std::to_string(8 * has) + " bits, expected " +
           std::to_string(8 * bytes));
    }
    const auto [entry, is_new] = registers_.try_emplace(operand.name, 0);
    if (is_new) entry->second = allocate(bytes);
    used_slots_.back().push_back(entry->second);
    return entry->second;
  }
  if (kSpecials.contains(operand.name)) return special(operand.name, bytes);
  if (operand.name == "WARP_SZ") return constant(kLanes, bytes);
  if (const auto address = address_of(operand.name)) {
    return constant(*address + static_cast<uint64_t>(operand.offset), bytes);
  }
  fail("'" + operand.name + "' is no register, variable or special register of the machine");
}

Slot Decoder::predicate(size_t index) {
  const Operand& what = operand(index);
  if (what.kind == Operand::Kind::kImmediate) return constant(what.bits != 0 ? kAllLanes : 0, 4);
  if (what.negated) op_->negated = kAllLanes;
  return slot(what, {'p', 1, 1});
}

Slot Decoder::any_register(const Operand& operand, uint8_t* bytes) {
  if (operand.kind == Operand::Kind::kName && operand.name == "_") {  // the result is discarded
    *bytes = 8;
    return allocate(8);
  }
  const auto declared = kernel_.registers.find(operand.name);
  if (declared == kernel_.registers.end()) {
    fail("expected a register, got '" + operand.name + "'");
  }
  *bytes = static_cast<uint8_t>(declared->second.register_bytes());
  return slot(operand, declared->second);
}

int Decoder::list(size_t index, Type type) {
  const Operand& what = operand(index);
  const bool is_vector = what.kind == Operand::Kind::kVector;
  const std::vector<Operand> parts = is_vector ? what.parts : std::vector<Operand>{what};
  for (const Operand& part : parts) program_.lists.push_back(slot(part, type));
  return static_cast<int>(parts.size());
}

Address Decoder::address(size_t index, Space space) {
  const Operand& what = operand(index);
  if (!what.parts.empty()) fail("expected one address in the brackets");
  return address(what, space);
}

Address Decoder::address(const Operand& what, Space space) {
  if (what.kind != Operand::Kind::kAddress) fail("expected an address in brackets");
  const bool is_shared = space == Space::kShared || space == Space::kSharedCluster;
  const uint64_t window = is_shared                ? window_start(kSharedWindow)
                          : space == Space::kLocal ? window_start(kLocalWindow)
                                                   : 0;
  Address result;
  result.offset = what.offset + static_cast<int64_t>(window);
  result.reaches_cluster = space == Space::kSharedCluster || space == Space::kGeneric;
  if (what.name.empty()) {
    result.slot = constant(0, 8);
  } else if (const auto address = address_of(what.name)) {
    result.slot = constant(*address, 8);
  } else {
    Operand base;
    base.name = what.name;
    result.slot = any_register(base, &result.bytes);
    if (result.bytes < 4) fail("an address has 32 or 64 bits");
  }
  return result;
}

size_t Decoder::label(const Operand& operand) const {
  const auto found = kernel_.labels.find(operand.name);
  if (found == kernel_.labels.end()) fail("there is no label '" + operand.name + "'");
  return found->second;
}

}  // namespace axonn::gpu_machine
