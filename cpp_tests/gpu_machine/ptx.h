// The contents of a PTX file as written: modules, kernels, variables, registers and instructions.
// Source: NVIDIA, "Parallel Thread Execution ISA", version 9.0, sections 4 to 7.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace axonn::gpu_machine {

struct Dim {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t count() const { return uint64_t{x} * y * z; }
  bool operator==(const Dim&) const = default;
};

struct SourceLine {
  int ptx = 0;        // line of the PTX text
  int file = 0;       // of the last .loc directive; 0 if there was none
  int cuda_line = 0;  // in that file
};

// A type such as .u32. Its letter is 'u', 's', 'b' or 'f'; 'h' for bfloat16, and 'p' for
// predicates.
struct Type {
  char letter = 'b';
  int bits = 0;   // of one element
  int lanes = 1;  // elements of a packed type, as in .f16x2

  bool is_float() const { return letter == 'f' || letter == 'h'; }
  bool is_signed() const { return letter == 's'; }
  int register_bytes() const { return letter == 'p' ? 4 : bits * lanes / 8; }
};

enum class Space : uint8_t { kGeneric, kParam, kGlobal, kShared, kSharedCluster, kLocal, kConst };

struct Operand {
  enum class Kind : uint8_t { kName, kImmediate, kAddress, kVector };

  Kind kind = Kind::kName;
  std::string name;            // of a register, variable or label; the base of an address
  uint64_t bits = 0;           // of an immediate
  char letter = 's';           // of an immediate: 's', or 'f' if written as a float
  int64_t offset = 0;          // of an address, in bytes
  bool negated = false;        // !p
  std::vector<Operand> parts;  // of {a, b}, of p|q, and of [map, {x, y}] after the map
};

struct Instruction {
  std::string opcode;                  // "ld"
  std::vector<std::string> modifiers;  // "global", "u32"
  std::string guard;                   // the predicate of @p; empty if there is none
  bool guard_negated = false;
  std::vector<Operand> operands;
  SourceLine where;
  std::string text;
};

struct Variable {
  std::string name;
  Space space = Space::kGlobal;
  uint64_t bytes = 0;
  uint64_t alignment = 1;
  bool is_extern = false;           // dynamic shared memory: the launch sets its size
  std::vector<std::byte> contents;  // empty if there is no initializer
};

// A kernel, or a function that kernels call.
struct Function {
  std::string name;
  // .maxntid, .minnctapersm and .maxnreg; 0 if not given
  int max_threads = 0, min_ctas = 0, max_registers = 0;
  Dim cluster;  // .reqnctapercluster
  std::vector<Variable> params;
  std::vector<Variable> results;    // of a function: at most one
  std::vector<Variable> variables;  // declared in the body, including parameters of calls
  std::map<std::string, Type> registers;
  std::vector<Instruction> instructions;
  std::map<std::string, size_t> labels;  // index of the instruction after it
};

struct Module {
  std::map<std::string, Function> kernels;  // with calls inlined
  std::map<std::string, Function> functions;
  std::vector<Variable> variables;
  std::map<int, std::string> files;  // named by .loc
};

// Returns the function with its calls replaced by the bodies of the called functions, so each lane
// makes its own calls and no stack is needed. Throws ParseError for recursion, for functions
// without a body, and for calls through a pointer.
Function inline_calls(const Function& function, const std::map<std::string, Function>& functions);

// Throws a ParseError that names the line.
Module parse_ptx(std::string_view text);

// Returns the type that a modifier such as "u32" names; bits is 0 if it is not a type.
Type type_of(std::string_view modifier);

}  // namespace axonn::gpu_machine
