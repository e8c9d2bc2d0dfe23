// Replaces calls of functions by the functions' bodies.
#include <algorithm>

#include "gpu_machine/errors.h"
#include "gpu_machine/ptx.h"

namespace axonn::gpu_machine {
namespace {

using Functions = std::map<std::string, Function>;

class Inliner {
 public:
  explicit Inliner(const Functions& functions) : functions_(functions) {}

  Function run(const Function& function) {
    Function whole = function;
    whole.instructions.clear();
    std::vector<size_t> places;  // new index of each of the function's instructions
    for (const Instruction& instruction : function.instructions) {
      places.push_back(whole.instructions.size());
      if (instruction.opcode == "call") {
        insert(whole, instruction);
      } else {
        whole.instructions.push_back(instruction);
      }
    }
    places.push_back(whole.instructions.size());
    for (const auto& [label, index] : function.labels) whole.labels[label] = places[index];
    return whole;
  }

 private:
  [[noreturn]] static void fail(const Instruction& call, const std::string& what) {
    throw ParseError("PTX line " + std::to_string(call.where.ptx) + ", `" + call.text +
                     "`: " + what);
  }

  // call (result), name, (arguments); the result and the arguments are optional.
  void insert(Function& whole, const Instruction& call) {
    const auto name =
        std::find_if(call.operands.begin(), call.operands.end(),
                     [](const Operand& operand) { return operand.kind != Operand::Kind::kVector; });
    if (name == call.operands.end()) fail(call, "it names no function");
    const auto callee = functions_.find(name->name);
    if (callee == functions_.end()) {
      fail(call, "the machine knows no function '" + name->name + "' with a body");
    }
    if (std::find(under_way_.begin(), under_way_.end(), name->name) != under_way_.end()) {
      fail(call, "the machine knows no function that calls itself");
    }
    const size_t before = static_cast<size_t>(name - call.operands.begin());
    const size_t behind = call.operands.size() - before - 1;
    if (before > 1 || behind > 1) fail(call, "expected a result, a name and arguments");
    under_way_.push_back(name->name);
    const Function body = run(callee->second);
    under_way_.pop_back();

    const std::string prefix = name->name + "#" + std::to_string(++calls_) + ".";
    Names names;
    for (const auto& [own, type] : body.registers) {
      names[own] = prefix + own;
      whole.registers[prefix + own] = type;
    }
    for (Variable variable : body.variables) {
      names[variable.name] = prefix + variable.name;
      variable.name = prefix + variable.name;
      whole.variables.push_back(variable);
    }
    for (const auto& [own, index] : body.labels) names[own] = prefix + own;
    pass(whole, call, body.results, before == 0 ? nullptr : &call.operands.front(), names);
    pass(whole, call, body.params, behind == 0 ? nullptr : &call.operands.back(), names);
    append(whole, call, body, names, prefix);
  }

  using Names = std::map<std::string, std::string>;

  // Makes the callee's parameters refer to the caller's variables.
  static void pass(const Function& whole, const Instruction& call,
                   const std::vector<Variable>& formal, const Operand* given, Names& names) {
    const size_t count = given == nullptr ? 0 : given->parts.size();
    if (count != formal.size()) {
      fail(call, "expected " + std::to_string(formal.size()) + " arguments or results, got " +
                     std::to_string(count));
    }
    for (size_t i = 0; i < count; ++i) {
      const std::string& actual = given->parts[i].name;
      const auto variable =
          std::find_if(whole.variables.begin(), whole.variables.end(),
                       [&](const Variable& known) { return known.name == actual; });
      if (variable == whole.variables.end() || variable->bytes != formal[i].bytes) {
        fail(call, "expected a .param variable of " + std::to_string(formal[i].bytes) +
                       " bytes, got '" + actual + "'");
      }
      names[formal[i].name] = actual;
    }
  }

  static void rename(std::string& name, const Names& names) {
    const auto found = names.find(name);
    if (found != names.end()) name = found->second;
  }
  static void rename(Operand& operand, const Names& names) {
    rename(operand.name, names);
    for (Operand& part : operand.parts) rename(part, names);
  }

  static void append(Function& whole, const Instruction& call, const Function& body,
                     const Names& names, const std::string& prefix) {
    const std::string end = prefix + "end";
    const auto branch_to_end = [&](Instruction branch) {
      branch.opcode = "bra";
      branch.modifiers.clear();
      branch.operands.assign(1, {});
      branch.operands[0].name = end;
      whole.instructions.push_back(branch);
    };
    if (!call.guard.empty()) {
      Instruction others = call;
      others.guard_negated = !call.guard_negated;
      branch_to_end(others);
    }
    const size_t first = whole.instructions.size();
    for (Instruction instruction : body.instructions) {
      rename(instruction.guard, names);
      for (Operand& operand : instruction.operands) rename(operand, names);
      if (instruction.opcode == "ret") {
        branch_to_end(instruction);
      } else {
        whole.instructions.push_back(instruction);
      }
    }
    for (const auto& [own, index] : body.labels) whole.labels[prefix + own] = first + index;
    whole.labels[end] = whole.instructions.size();
  }

  const Functions& functions_;
  std::vector<std::string> under_way_;
  int calls_ = 0;
};

}  // namespace

Function inline_calls(const Function& function, const Functions& functions) {
  return Inliner(functions).run(function);
}

}  // namespace axonn::gpu_machine
