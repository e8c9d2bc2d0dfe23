// Errors that the machine reports. Each ends the run: nothing is corrected or ignored.
#pragma once

#include <stdexcept>
#include <string>

namespace axonn::gpu_machine {

// PTX that the parser does not understand, or that the machine cannot execute.
class ParseError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A mistake of a kernel at run time.
class MachineError : public std::runtime_error {
 public:
  enum class Kind {
    kMemory,     // outside an allocation, misaligned, never written, read-only
    kRace,       // two unordered accesses, at least one of them weak
    kDeadlock,   // nothing can proceed, or memory has not changed for long
    kTrap,       // a trap was executed
    kUndefined,  // an instruction whose result PTX leaves undefined
    kMisuse,     // library calls that break the library's rules
    kGone,       // the GPU no longer answers, because a test says so
  };

  // The message ends with the kind in brackets, for tools/emulate_mutants.py.
  MachineError(Kind kind, const std::string& message)
      : std::runtime_error(message + " [" + name_of(kind) + "]"), kind_(kind) {}
  Kind kind() const { return kind_; }

 private:
  static std::string name_of(Kind kind) {
    switch (kind) {
      case Kind::kMemory:
        return "memory";
      case Kind::kRace:
        return "race";
      case Kind::kDeadlock:
        return "deadlock";
      case Kind::kTrap:
        return "trap";
      case Kind::kUndefined:
        return "undefined";
      case Kind::kMisuse:
        return "misuse";
      case Kind::kGone:
        return "gone";
    }
    return "";
  }

  Kind kind_;
};

}  // namespace axonn::gpu_machine
