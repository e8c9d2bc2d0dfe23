// A rank's work in one collective, as a list of steps. They are recorded from the code of
// fused_order.h that the ops run, and from the tile schedules that kernels follow; the tests'
// simulator runs them. Each step names its group, so a program may have calls on several groups
// open at once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/schedule/chunk_plan.h"
#include "core/schedule/tile_schedule.h"
#include "core/symmetric/epoch_flag.h"

namespace axonn::comm {

enum class Action : int32_t {
  kAwaitCompleted,  // until `peer` has completed `epoch` and no longer reads the half
  kWrite,           // this rank's chunk `flag`
  kSignal,          // this rank's flag `flag`, raised to `epoch`
  kWait,            // until `flag` of `peer` has reached `epoch`
  kRead,            // chunk `flag` of `peer`: a copy, or an operand of a matmul
  kAdd,             // chunk `flag` of `peer`: the next addend of a sum
  kComplete,        // this rank's `completed`, raised to `epoch`
};

// Chunks are named by the flags that signal them.
struct Step {
  Action action;
  int64_t rank;  // the rank that takes the step
  int64_t peer;  // the rank whose pad or workspace is used
  int64_t flag;
  Epoch epoch;
  int64_t group = 0;  // numbers `rank` and `peer`, and has its own epochs

  std::string describe() const;
};

using Program = std::vector<Step>;

// The patterns that all ops are made of.
//   kGather          all_gather, all_gather_matmul, matmul_all_gather_rhs
//   kReduceScatter   reduce_scatter, matmul_reduce_scatter, and the weight's gradient over z
//   kAllReduce       all_reduce, matmul_all_reduce; kOneShot is a small one
enum class Pattern : int32_t { kGather, kReduceScatter, kAllReduce, kOneShot };

// Identifies a call by its caller and its epoch.
struct Caller {
  int64_t rank;
  int64_t size;
  Epoch epoch;
  int64_t group = 0;
};

// Replaces comm::Call, or the flags of one matrix in it, which begin at `first_flag`.
class Recorder {
 public:
  Recorder(const Caller& caller, Program& program, int64_t first_flag = 0)
      : caller_(&caller), program_(&program), first_flag_(first_flag) {}

  int64_t rank() const { return caller_->rank; }
  int64_t size() const { return caller_->size; }
  void signal(int64_t flag) { push(Action::kSignal, rank(), flag); }
  void wait(int64_t peer, int64_t flag) { push(Action::kWait, peer, flag); }

  void write(int64_t flag) { push(Action::kWrite, rank(), flag); }
  void read(int64_t peer, int64_t flag) { push(Action::kRead, peer, flag); }
  void add_all(int64_t flag) {  // as reduce_slots does
    for (int64_t source = 0; source < size(); ++source) push(Action::kAdd, source, flag);
  }

 private:
  void push(Action action, int64_t peer, int64_t flag) {
    program_->push_back({action, rank(), peer, first_flag_ + flag, caller_->epoch, caller_->group});
  }

  const Caller* caller_;
  Program* program_;
  int64_t first_flag_;
};

// Return the wait at the start of a call, and its end, like the constructor and destructor of
// comm::Call.
Program begin_program(const Caller& caller);
Program complete_program(const Caller& caller);

// Returns a whole call of a single-threaded rank, as on the CPU. `count` elements are summed; the
// caller's epoch is that of the previous call.
Program call_program(Pattern pattern, int64_t count, Caller& caller);

// On CUDA a gather that feeds a GEMM has three parts, on two streams. The transport publishes this
// rank's shard and copies peers' chunks into local memory, in the order of GatherTiles, raising
// local flags (those of phase 1). The CTAs of a persistent GEMM wait for local flags. At the end a
// stream operation completes the call.
Program transport_program(const ChunkPlan& plan, const Caller& caller);

enum class WaitRule : int32_t { kEachChunk, kLastDelivered };
Program gemm_program(const kernels::GatherTiles& tiles, int64_t cta, int64_t num_ctas,
                     WaitRule rule, const Caller& caller);

}  // namespace axonn::comm
