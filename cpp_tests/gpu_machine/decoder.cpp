#include "gpu_machine/decoder.h"

#include <algorithm>

#include "gpu_machine/memory.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint64_t kLocalAlignment = 32;  // the largest vector

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
    // Local memory. Parameters of calls live there, too, and are named without cvta.
    program_.local_bytes = align_up(program_.local_bytes, variable.alignment);
    const uint64_t window = variable.space == Space::kParam ? window_start(kLocalWindow) : 0;
    symbols_[variable.name] = window + kVariablesStart + program_.local_bytes;
    program_.local_bytes += variable.bytes;
  }
  program_.local_bytes = align_up(program_.local_bytes, kLocalAlignment);
  for (const bool dynamic : {false, true}) {  // dynamic shared memory follows static
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

Program decode(const Function& kernel, const Symbols& symbols,
               const std::map<int, std::string>& files) {
  Program program;
  program.name = kernel.name;
  program.params = kernel.params;
  program.max_threads = kernel.max_threads;
  program.min_ctas = kernel.min_ctas;
  program.max_registers = kernel.max_registers;
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
