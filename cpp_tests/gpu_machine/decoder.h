// What the instruction families need to decode an instruction: its modifiers and operands. Each of
// them must be used, so that no part of an instruction is ignored.
#pragma once

#include <initializer_list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "gpu_machine/errors.h"
#include "gpu_machine/program.h"

namespace axonn::gpu_machine {

class Decoder {
 public:
  Decoder(const Function& kernel, const Symbols& symbols, Program& program);

  // Begins an instruction; finish() checks that every part of it was used.
  void begin(const Instruction& instruction, Op& op);
  void finish() const;

  const std::string& opcode() const { return instruction_->opcode; }
  [[noreturn]] void fail(const std::string& what) const;

  bool is_warp_barrier() const { return !modifiers_.empty() && modifiers_[0] == "warp"; }

  bool has_modifier(std::string_view modifier) const;
  // Removes a modifier from any position, and returns whether it was there.
  bool take(std::string_view modifier);
  // Removes and returns the first of these that is there; empty if none is.
  std::string take_one(std::initializer_list<std::string_view> modifiers);
  std::string take_first();  // any modifier; empty if there is none
  Type take_type();          // the last modifier that is a type
  Type last_type() const;    // the same, not removed; bits is 0 if there is none
  Rounding take_rounding();
  void take_order_and_scope();  // stored in the Op

  size_t num_operands() const { return instruction_->operands.size(); }
  const Operand& operand(size_t index);
  // The slot of a register, immediate, special register or variable, with the type's size per lane.
  Slot slot(const Operand& operand, Type type);
  Slot slot(size_t index, Type type) { return slot(operand(index), type); }
  Slot predicate(size_t index);  // an operand; !p sets the Op's `negated`
  // A register of any width, which goes into `bytes`.
  Slot any_register(const Operand& operand, uint8_t* bytes);
  // Appends the registers of an operand {a, b, ...}, each of the type's bits, to the program's
  // lists. Returns how many there are.
  int list(size_t index, Type type);
  // Marks the registers of this instruction's lists as those of a warpgroup's product.
  void note_product();
  // Call after decoding: records for every other Op which of those registers it uses.
  void note_touched(std::vector<Op>& ops);
  Address address(size_t index, Space space);
  Address address(const Operand& what, Space space);
  size_t label(const Operand& operand) const;
  bool is_register(const Operand& operand) const;
  bool is_predicate(size_t index) const;  // a predicate register
  bool is_address(size_t index) const;
  bool is_sink(size_t index) const;  // the operand _
  Slot constant(uint64_t bits, int bytes);

  Op& op() { return *op_; }

 private:
  Slot allocate(int lane_bytes);
  Slot special(const std::string& name, int bytes);
  std::optional<uint64_t> address_of(const std::string& name) const;
  void lay_out_variables();

  const Function& kernel_;
  Program& program_;
  const Instruction* instruction_ = nullptr;
  Op* op_ = nullptr;
  std::vector<std::string> modifiers_;
  std::vector<std::vector<Slot>> used_slots_;  // registers, by instruction
  std::set<Slot> product_slots_;
  std::set<size_t> products_;  // indices of instructions
  size_t used_operands_ = 0;
  Symbols symbols_;
  std::map<std::string, Slot> registers_;
  std::map<std::pair<uint64_t, int>, Slot> immediates_;
  std::map<std::pair<std::string, int>, Slot> specials_;
};

// Removes and returns the state space of an access; generic if there is none.
Space take_space(Decoder& decoder);

// Each decodes its own opcodes, and returns false for others.
bool decode_integer(Decoder& decoder);
bool decode_bits(Decoder& decoder);
bool decode_float(Decoder& decoder);
bool decode_compare(Decoder& decoder);
bool decode_convert(Decoder& decoder);
bool decode_memory(Decoder& decoder);
bool decode_atomic(Decoder& decoder);
bool decode_warp(Decoder& decoder);
bool decode_control(Decoder& decoder);
bool decode_cluster(Decoder& decoder);
bool decode_mbarrier(Decoder& decoder);
bool decode_bulk(Decoder& decoder);
bool decode_matrix(Decoder& decoder);
bool decode_async_copy(Decoder& decoder);
bool decode_copy_arrival(Decoder& decoder);
bool decode_async_store(Decoder& decoder);
bool decode_tensormap(Decoder& decoder);
bool decode_multimem(Decoder& decoder);
bool decode_wgmma(Decoder& decoder);

}  // namespace axonn::gpu_machine
