#include "model/protocol_program.h"

#include <sstream>

#include "core/symmetric/protocol.h"
#include "core/symmetric/symmetric_group.h"
#include "model/recorded_parts.h"

namespace axonn::comm {

static_assert(kNumSignals == SymmetricGroup::kNumFlags);
static_assert(kSignalStride == static_cast<int64_t>(sizeof(EpochFlag)));

std::string Step::describe() const {
  static constexpr const char* kNames[] = {
      "awaits completion", "writes", "signals", "waits for", "reads", "adds", "completes"};
  std::ostringstream out;
  out << "rank " << rank << " in epoch " << epoch << ' ' << kNames[static_cast<int>(action)]
      << " flag " << flag << " of rank " << peer;
  if (group > 0) out << " in group " << group;
  return out.str();
}

Program begin_program(const Caller& caller) {
  Program program;
  for (int64_t peer = 0; peer < caller.size; ++peer) {
    program.push_back({Action::kAwaitCompleted, caller.rank, peer, 0, epoch_to_await(caller.epoch),
                       caller.group});
  }
  return program;
}

Program complete_program(const Caller& caller) {
  return {{Action::kComplete, caller.rank, caller.rank, 0, caller.epoch, caller.group}};
}

namespace {

void record_call(Pattern pattern, int64_t count, RecordedCall call) {
  if (pattern == Pattern::kGather) {
    RecordedGather(call, {1, 1}, 0).take();
    return;
  }
  const auto drain = pattern == Pattern::kReduceScatter ? Drain::kScatterRows : Drain::kAllReduce;
  RecordedSum sum(call, count, 1, drain, pattern == Pattern::kOneShot, /*in_one_piece=*/false);
  sum.produce([&](int64_t part) {
    if (sum.rows(part).size() > 0) sum.slot(part);
  });
  sum.finish();
}

}  // namespace

Program call_program(Pattern pattern, int64_t count, Caller& caller) {
  Program program;
  record_call(pattern, count, {caller, program});
  return program;
}

Program transport_program(const ChunkPlan& plan, const Caller& caller) {
  Program program;
  Recorder call(caller, program);
  const auto layout = SignalLayout::of(plan, 2);
  for (int64_t chunk = 0; chunk < plan.chunks_per_shard; ++chunk) {
    const int64_t flag = layout.flag(0, {caller.rank, chunk});
    call.write(flag);
    call.signal(flag);
  }
  for (int64_t step = 0; step < plan.num_chunks(); ++step) {
    const ChunkIndex index = plan.gather_visit(caller.rank, step);
    call.wait(index.shard, layout.flag(0, index));
    call.read(index.shard, layout.flag(0, index));
    call.write(layout.flag(1, index));
    call.signal(layout.flag(1, index));
  }
  return program;
}

Program gemm_program(const kernels::GatherTiles& tiles, int64_t cta, int64_t num_ctas,
                     WaitRule rule, const Caller& caller) {
  Program program;
  Recorder call(caller, program);
  const auto layout = SignalLayout::of(tiles.plan, 2);
  const int64_t turns = kernels::num_turns(tiles.num_tiles(), cta, num_ctas);
  for (int64_t turn = 0; turn < turns; ++turn) {
    const int64_t index = kernels::index_of_turn(turn, cta, num_ctas);
    const ChunkSpan needed = tiles.needed(index);
    const auto flag_of = [&](int64_t ordinal) {
      return layout.flag(1, tiles.plan.from_ordinal(ordinal));
    };
    if (rule == WaitRule::kLastDelivered) {
      call.wait(caller.rank, layout.flag(1, tiles.last_delivered(index)));
    } else {
      for (int64_t i = needed.first; i <= needed.last; ++i) call.wait(caller.rank, flag_of(i));
    }
    for (int64_t i = needed.first; i <= needed.last; ++i) call.read(caller.rank, flag_of(i));
  }
  return program;
}

}  // namespace axonn::comm
