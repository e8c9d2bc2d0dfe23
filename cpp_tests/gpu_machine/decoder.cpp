#include "gpu_machine/decoder.h"

#include <algorithm>
#include <bit>
#include <set>

#include "gpu_machine/memory.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint64_t kLocalAlignment = 32;  // the largest vector

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

uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace

Decoder::Decoder(const Function& kernel, const Symbols& symbols, Program& program)
    : kernel_(kernel), program_(program), symbols_(symbols) {
  lay_out_variables();
}

void Decoder::lay_out_variables() {
  for (const Variable& param : kernel_.params) {
    program_.param_bytes = align_up(program_.param_bytes, param.alignment);
    symbols_[param.name] = window_start(kParamWindow) + program_.param_bytes;
    program_.param_offsets.push_back(program_.param_bytes);
    program_.param_bytes += param.bytes;
  }
  for (const Variable& variable : kernel_.variables) {
    if (variable.space == Space::kShared) continue;
    // Local memory; parameters of calls are there, too, and are named without cvta.
    program_.local_bytes = align_up(program_.local_bytes, variable.alignment);
    const uint64_t window = variable.space == Space::kParam ? window_start(kLocalWindow) : 0;
    symbols_[variable.name] = window + kVariablesStart + program_.local_bytes;
    program_.local_bytes += variable.bytes;
  }
  program_.local_bytes = align_up(program_.local_bytes, kLocalAlignment);
  for (const bool dynamic : {false, true}) {  // dynamic shared memory lies behind the static one
    for (const Variable& variable : kernel_.variables) {
      if (variable.space != Space::kShared || variable.is_extern != dynamic) continue;
      program_.shared_bytes = align_up(program_.shared_bytes, variable.alignment);
      symbols_[variable.name] = kVariablesStart + program_.shared_bytes;
      if (!dynamic) program_.shared_bytes += variable.bytes;
    }
  }
}

void Decoder::begin(const Instruction& instruction, Op& op) {
  instruction_ = &instruction;
  op_ = &op;
  op.list = static_cast<uint32_t>(program_.lists.size());
  used_slots_.emplace_back();
  modifiers_ = instruction.modifiers;
  used_operands_ = 0;
  if (instruction.guard.empty()) return;
  Operand guard;
  guard.name = instruction.guard;
  op.has_guard = true;
  op.guard_negated = instruction.guard_negated;
  op.guard = slot(guard, {'p', 1, 1});
}

void Decoder::finish() const {
  if (used_operands_ < num_operands()) fail("it has more operands than the machine knows");
  if (!modifiers_.empty()) fail("the machine does not know the modifier '." + modifiers_[0] + "'");
}

void Decoder::fail(const std::string& what) const {
  throw ParseError("kernel " + kernel_.name + ", PTX line " +
                   std::to_string(instruction_->where.ptx) + ", `" + instruction_->text +
                   "`: " + what);
}

bool Decoder::has_modifier(std::string_view modifier) const {
  return std::find(modifiers_.begin(), modifiers_.end(), modifier) != modifiers_.end();
}

bool Decoder::take(std::string_view modifier) {
  const auto found = std::find(modifiers_.begin(), modifiers_.end(), modifier);
  if (found == modifiers_.end()) return false;
  modifiers_.erase(found);
  return true;
}

std::string Decoder::take_one(std::initializer_list<std::string_view> modifiers) {
  for (const std::string_view modifier : modifiers) {
    if (take(modifier)) return std::string(modifier);
  }
  return "";
}

std::string Decoder::take_first() {
  const std::string first = modifiers_.empty() ? "" : modifiers_.front();
  take(first);
  return first;
}

Type Decoder::take_type() {
  for (size_t i = modifiers_.size(); i-- > 0;) {
    const Type type = type_of(modifiers_[i]);
    if (type.bits == 0) continue;
    modifiers_.erase(modifiers_.begin() + static_cast<int64_t>(i));
    return type;
  }
  fail("expected a type");
}

Type Decoder::last_type() const {
  for (auto modifier = modifiers_.rbegin(); modifier != modifiers_.rend(); ++modifier) {
    const Type type = type_of(*modifier);
    if (type.bits != 0) return type;
  }
  return {};
}

Rounding Decoder::take_rounding() {
  const std::string mode = take_one({"rn", "rz", "rm", "rp"});
  return mode == "rz"   ? Rounding::kZero
         : mode == "rm" ? Rounding::kDown
         : mode == "rp" ? Rounding::kUp
                        : Rounding::kNearest;
}

void Decoder::take_order_and_scope() {
  const std::string order =
      take_one({"weak", "relaxed", "acquire", "release", "acq_rel", "volatile"});
  if (order == "relaxed" || order == "volatile") op_->order = Order::kRelaxed;
  if (order == "acquire") op_->order = Order::kAcquire;
  if (order == "release") op_->order = Order::kRelease;
  if (order == "acq_rel") op_->order = Order::kAcquireRelease;
  const std::string scope = take_one({"cta", "cluster", "gpu", "sys"});
  if (scope == "cta") op_->scope = Scope::kCta;
  if (scope == "cluster") op_->scope = Scope::kCluster;
  if (scope == "gpu") op_->scope = Scope::kGpu;
  if (scope == "sys" || order == "volatile") op_->scope = Scope::kSystem;
}

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
  if (operand.kind == Operand::Kind::kName && operand.name == "_") {  // the result is not wanted
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

void Decoder::note_product() {
  product_slots_.insert(program_.lists.begin() + op_->list, program_.lists.end());
  products_.insert(used_slots_.size() - 1);
}

void Decoder::note_touched(std::vector<Op>& ops) {
  for (size_t i = 0; i < ops.size(); ++i) {
    if (products_.contains(i)) continue;
    ops[i].touched = static_cast<uint32_t>(program_.lists.size());
    for (const Slot slot : used_slots_[i]) {
      if (product_slots_.contains(slot)) program_.lists.push_back(slot);
    }
    ops[i].is_move = program_.instructions[i].opcode == "mov";
    ops[i].num_touched = static_cast<uint8_t>(program_.lists.size() - ops[i].touched);
  }
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

Program decode(const Function& kernel, const Symbols& symbols,
               const std::map<int, std::string>& files) {
  Program program;
  program.name = kernel.name;
  program.params = kernel.params;
  program.max_threads = kernel.max_threads;
  program.cluster = kernel.cluster;
  program.instructions = kernel.instructions;
  program.files = std::make_shared<const std::map<int, std::string>>(files);
  Decoder decoder(kernel, symbols, program);
  for (const Instruction& instruction : kernel.instructions) {
    Op op;
    decoder.begin(instruction, op);
    const bool known = decode_async_store(decoder) || decode_memory(decoder) ||
                       decode_cluster(decoder) || decode_mbarrier(decoder) ||
                       decode_bulk(decoder) || decode_control(decoder) || decode_integer(decoder) ||
                       decode_bits(decoder) || decode_float(decoder) || decode_compare(decoder) ||
                       decode_convert(decoder) || decode_atomic(decoder) || decode_warp(decoder) ||
                       decode_matrix(decoder) || decode_async_copy(decoder) ||
                       decode_copy_arrival(decoder) || decode_wgmma(decoder) ||
                       decode_tensormap(decoder) || decode_multimem(decoder);
    if (!known) decoder.fail("the machine does not know this instruction");
    decoder.finish();
    program.ops.push_back(op);
  }
  decoder.note_touched(program.ops);
  return program;
}

}  // namespace axonn::gpu_machine
