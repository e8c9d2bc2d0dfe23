// What the families of instructions need to decode one: its modifiers and operands, each of which
// must be used, so that nothing of an instruction is ignored.
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

  // Begins an instruction; finish() checks that all of it was used.
  void begin(const Instruction& instruction, Op& op);
  void finish() const;

  const std::string& opcode() const { return instruction_->opcode; }
  [[noreturn]] void fail(const std::string& what) const;

  bool is_warp_barrier() const { return !modifiers_.empty() && modifiers_[0] == "warp"; }

  bool has_modifier(std::string_view modifier) const;
  // Takes a modifier away, wherever it stands, and returns whether it was there.
  bool take(std::string_view modifier);
  // Takes the first of these that is there; empty if none is.
  std::string take_one(std::initializer_list<std::string_view> modifiers);
  std::string take_first();  // whatever it is; empty if there is none
  Type take_type();          // the last one that is a type
  Type last_type() const;    // the same, which stays; bits is 0 if there is none
  Rounding take_rounding();
  void take_order_and_scope();  // into the Op

  size_t num_operands() const { return instruction_->operands.size(); }
  const Operand& operand(size_t index);
  // The place of a register, immediate, special register or variable of so many bytes a lane.
  Slot slot(const Operand& operand, Type type);
  Slot slot(size_t index, Type type) { return slot(operand(index), type); }
  Slot predicate(size_t index);  // of an operand; !p sets the Op's `negated`
  // A register of any width, which is returned.
  Slot any_register(const Operand& operand, uint8_t* bytes);
  // The registers of an operand {a, b, ...} of so many bits each, at the end of the program's
  // lists. Returns how many there are.
  int list(size_t index, Type type);
  // The registers of this instruction's lists are those of a product of a warpgroup.
  void note_product();
  // When all is decoded: tells each other Op which of those registers it uses.
  void note_touched(std::vector<Op>& ops);
  Address address(size_t index, Space space);
  Address address(const Operand& what, Space space);
  size_t label(const Operand& operand) const;
  bool is_register(const Operand& operand) const;
  bool is_predicate(size_t index) const;  // a register of that kind
  bool is_address(size_t index) const;
  bool is_sink(size_t index) const;  // _
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
  std::set<size_t> products_;  // instructions
  size_t used_operands_ = 0;
  Symbols symbols_;
  std::map<std::string, Slot> registers_;
  std::map<std::pair<uint64_t, int>, Slot> immediates_;
  std::map<std::pair<std::string, int>, Slot> specials_;
};

// Takes the space of an access away; generic if there is none.
Space take_space(Decoder& decoder);

// Each decodes what it knows and returns false for other opcodes.
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
