// What the machine reports. Each report ends the run: nothing is corrected or ignored.
#pragma once

#include <stdexcept>
#include <string>

namespace axonn::gpu_machine {

// PTX that the parser does not understand, or that the machine does not execute.
class ParseError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What a kernel did wrong while it ran.
class MachineError : public std::runtime_error {
 public:
  enum class Kind {
    kMemory,     // outside an allocation, misaligned, never written, read-only
    kRace,       // two accesses that nothing orders, one of which is a weak one
    kDeadlock,   // nobody can go on, or nothing has changed for long
    kTrap,       // a trap was executed
    kUndefined,  // an instruction whose result PTX leaves undefined
    kMisuse,     // calls of a library that break its rules
    kGone,       // the GPU does not answer any more, because a test says so
  };

  // The message ends with the kind in brackets, which tools/emulate_mutants.py reads.
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
