// A kernel as the machine runs it: instructions decoded once, operands as places in a warp's
// registers.
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
// Runs an instruction for the lanes of the mask.
using Execute = void (*)(const Op& op, Warp& warp, uint32_t mask);
// Whether these lanes may go on with it.
using Ready = bool (*)(const Op& op, Warp& warp, uint32_t mask);

// Where an operand begins in a warp's registers, in bytes. A register has a value for each lane,
// one behind the other; a predicate is a word with a bit for each lane. Immediates and special
// registers have places there, too.
using Slot = uint32_t;
inline constexpr uint32_t kRegisterAlignment = 64;  // in bytes, for vector instructions of the CPU

enum class Flow : uint8_t {
  kNext,
  kBranch,
  kExit,
  kMeet,     // the lanes of its membermask run it together
  kMeetAll,  // all lanes of the warp that have not exited run it together
  kBarrier,  // of the CTA; like kMeetAll, then waits for other warps
  kYield,    // lets others go on: it polls or sleeps
  kWait,     // the lanes that run it wait until it is ready
};
enum class Order : uint8_t { kWeak, kRelaxed, kAcquire, kRelease, kAcquireRelease };
enum class Rounding : uint8_t { kNearest, kZero, kDown, kUp };
enum class BarrierKind : uint8_t { kSync, kArrive, kPopc, kAnd, kOr };

// An address of an instruction: that in a register, and an offset.
struct Address {
  Slot slot = 0;
  int64_t offset = 0;
  uint8_t bytes = 8;             // of the register
  bool reaches_cluster = false;  // it may be one of another CTA's shared memory
};

struct Op {
  Execute execute = nullptr;
  Execute inner = nullptr;  // what `execute` wraps
  Ready ready = nullptr;    // of kWait and kMeetAll; null if it is always ready
  Slot d = 0, d2 = 0;       // results
  Slot a = 0, b = 0, c = 0, e = 0;
  Slot guard = 0;
  Slot members = 0;      // of kMeet
  Slot vector[8] = {};   // registers of a vector
  Address at;            // what it accesses
  Address from, signal;  // of asynchronous copies: their source or descriptor, and mbarrier
  uint32_t target = 0;   // of a branch
  uint32_t list = 0;     // where its registers begin in the program's lists
  uint32_t touched = 0;  // likewise, those that products of warpgroups use, too
  uint32_t negated = 0;  // kAllLanes if the predicate operand is !p
  Flow flow = Flow::kNext;
  Order order = Order::kWeak;
  Scope scope = Scope::kNone;
  Rounding rounding = Rounding::kNearest;
  BarrierKind barrier = BarrierKind::kSync;
  Type type, source_type;
  uint8_t count = 1;                             // elements of a vector
  uint8_t register_bytes = 0, source_bytes = 0;  // of the registers, which may be wider than types
  uint8_t choice = 0;  // which of its family: an instruction's own meaning
  uint8_t num_touched = 0;
  bool is_move = false;  // of a register: ptxas may take the same one instead
  bool has_guard = false, guard_negated = false;
  bool ftz = false, sat = false;
  bool has_count = false;       // bar.sync a, b
  bool meets_anywhere = false;  // bar.warp.sync: lanes may wait at different ones
};

// What is put into a slot when a warp starts.
struct Constant {
  enum class Kind : uint8_t { kImmediate, kSpecial };
  Slot slot = 0;
  int bytes = 0;  // of a lane
  Kind kind = Kind::kImmediate;
  uint64_t bits = 0;
  std::string special;  // "%tid.x"
};

struct Program {
  std::string name;
  std::vector<Op> ops;
  std::vector<Instruction> instructions;  // of the same index, for messages
  std::vector<Constant> constants;
  std::vector<Slot> lists;  // registers of instructions that have many
  std::vector<Variable> params;
  std::vector<uint64_t> param_offsets;
  uint64_t param_bytes = 0;
  uint64_t shared_bytes = 0;  // of static shared memory, from kVariablesStart on
  uint64_t local_bytes = 0;   // of a lane's local memory, from kVariablesStart on
  uint32_t register_bytes = 0;
  int max_threads = 0, min_ctas = 0, max_registers = 0;  // 0 if the kernel does not say
  Dim cluster;  // that the kernel demands; of one CTA if it demands none
  std::shared_ptr<const std::map<int, std::string>> files;
};

// Offsets below in shared and local memory are not handed out, so that an address of 0 is outside.
inline constexpr uint64_t kVariablesStart = 1024;
// An address in shared memory has the offset in its lower bits. Above them is the CTA's rank in the
// cluster and one more, or zero for the own CTA.
inline constexpr int kSharedBits = 24;
inline constexpr uint64_t kMostClusterCtas = 8;

// Addresses of a module's variables in device memory.
using Symbols = std::map<std::string, uint64_t>;

// Throws ParseError, which names the first instruction that the machine does not know.
Program decode(const Function& kernel, const Symbols& symbols,
               const std::map<int, std::string>& files);

}  // namespace axonn::gpu_machine
