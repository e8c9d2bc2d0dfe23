// A kernel in the form that the machine runs: instructions are decoded once, and operands are
// places in a warp's registers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gpu_machine/clock.h"
#include "gpu_machine/ptx.h"

namespace axonn::gpu_machine {

inline constexpr int kLanes = 32;
inline constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

class Warp;
struct Op;
// Runs an instruction for the lanes in the mask.
using Execute = void (*)(const Op& op, Warp& warp, uint32_t mask);
// Whether these lanes can run it now.
using Ready = bool (*)(const Op& op, Warp& warp, uint32_t mask);

// The place of an operand in a warp's registers, in bytes. A register holds one value per lane,
// contiguously; a predicate is a word with one bit per lane. Immediates and special registers have
// places there, too.
using Slot = uint32_t;
inline constexpr uint32_t kRegisterAlignment = 64;  // in bytes, for the CPU's vector instructions

enum class Flow : uint8_t {
  kNext,
  kBranch,
  kExit,
  kMeet,     // the lanes in its membermask run it together
  kMeetAll,  // all lanes of the warp that have not exited run it together
  kBarrier,  // of the CTA; like kMeetAll, then waits for other warps
  kYield,    // polls or sleeps, so others get a turn
  kWait,     // the lanes that run it wait until it is ready
};
enum class Order : uint8_t { kWeak, kRelaxed, kAcquire, kRelease, kAcquireRelease };
enum class Rounding : uint8_t { kNearest, kZero, kDown, kUp };
enum class BarrierKind : uint8_t { kSync, kArrive, kPopc, kAnd, kOr };

// An address operand: a register plus an offset.
struct Address {
  Slot slot = 0;
  int64_t offset = 0;
  uint8_t bytes = 8;             // of the register
  bool reaches_cluster = false;  // may lie in another CTA's shared memory
};

struct Op {
  Execute execute = nullptr;
  Execute inner = nullptr;  // what `execute` wraps
  Ready ready = nullptr;    // for kWait and kMeetAll; null if always ready
  Slot d = 0, d2 = 0;       // results
  Slot a = 0, b = 0, c = 0, e = 0;
  Slot guard = 0;
  Slot members = 0;      // for kMeet
  Slot vector[8] = {};   // registers of a vector
  Address at;            // what it accesses
  Address from, signal;  // for async copies: source or descriptor, and mbarrier
  uint32_t target = 0;   // for branches
  uint32_t list = 0;     // where its registers begin in the program's lists
  uint32_t touched = 0;  // likewise, for those that warpgroup products also use
  uint32_t negated = 0;  // kAllLanes if the predicate operand is !p
  Flow flow = Flow::kNext;
  Order order = Order::kWeak;
  Scope scope = Scope::kNone;
  Rounding rounding = Rounding::kNearest;
  BarrierKind barrier = BarrierKind::kSync;
  Type type, source_type;
  uint8_t count = 1;                             // elements of a vector
  uint8_t register_bytes = 0, source_bytes = 0;  // of registers, which may be wider than types
  uint8_t choice = 0;  // variant within its family; each instruction defines its values
  uint8_t num_touched = 0;
  bool is_move = false;  // of a register; ptxas may use one register for both
  bool has_guard = false, guard_negated = false;
  bool ftz = false, sat = false;
  bool has_count = false;       // bar.sync a, b
  bool meets_anywhere = false;  // bar.warp.sync: lanes may wait at different ones
};

// A value put into a slot when a warp starts.
struct Constant {
  enum class Kind : uint8_t { kImmediate, kSpecial };
  Slot slot = 0;
  int bytes = 0;  // per lane
  Kind kind = Kind::kImmediate;
  uint64_t bits = 0;
  std::string special;  // "%tid.x"
};

struct Program {
  std::string name;
  std::vector<Op> ops;
  std::vector<Instruction> instructions;  // with the same indices, for messages
  std::vector<Constant> constants;
  std::vector<Slot> lists;  // registers of instructions with many of them
  std::vector<Variable> params;
  std::vector<uint64_t> param_offsets;
  uint64_t param_bytes = 0;
  uint64_t shared_bytes = 0;  // static shared memory, from kVariablesStart on
  uint64_t local_bytes = 0;   // local memory per lane, from kVariablesStart on
  uint32_t register_bytes = 0;
  int max_threads = 0, min_ctas = 0, max_registers = 0;  // 0 if not given
  Dim cluster;  // as the kernel requires; one CTA if it does not
  std::shared_ptr<const std::map<int, std::string>> files;
};

// Lower offsets in shared and local memory are never handed out, so that address 0 is invalid.
inline constexpr uint64_t kVariablesStart = 1024;
// An address in shared memory has the offset in its lower bits. Above them is the CTA's rank in the
// cluster plus one, or zero for the thread's own CTA.
inline constexpr int kSharedBits = 24;
inline constexpr uint64_t kMostClusterCtas = 8;

// Addresses of a module's variables in device memory, by name.
using Symbols = std::map<std::string, uint64_t>;

// Throws a ParseError that names the first instruction the machine does not know.
Program decode(const Function& kernel, const Symbols& symbols,
               const std::map<int, std::string>& files);

}  // namespace axonn::gpu_machine
