// The collectives as sequences of writes, signals, waits and reads, over any `Call` that has
// rank(), size(), signal(flag) and wait(peer, flag). The tests run them on a recorder, and show for
// the recorded steps that no interleaving of ranks deadlocks, reads too early or overwrites too
// early. The CPU ops run the second halves of the sums from here. What they gather and multiply
// follows the same plans, orders and flags, tile by tile.
//
// Every chunk is signalled, even an empty one; callbacks are not called for empty ranges.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/schedule/chunk_plan.h"
#include "core/symmetric/epoch_flag.h"
#include "core/symmetric/signal_layout.h"

namespace axonn::comm {

// The number of parts ("halves") of a workspace. The call of epoch e uses half e % kNumHalves. It
// starts once every rank has completed the call of epoch e - kNumHalves, which was the last to read
// that half.
inline constexpr Epoch kNumHalves = 2;
constexpr Epoch epoch_to_await(Epoch epoch) { return epoch - kNumHalves; }

// Throws std::invalid_argument unless the plan is legal for a group of `group_size` ranks and its
// signals fit into a pad.
inline void require_legal(const char* op, const ChunkPlan& plan, int64_t num_phases,
                          int64_t group_size) {
  const auto layout = SignalLayout::of(plan, num_phases);
  const bool whole = num_phases == 2 && plan.num_shards == 1;  // all-reduce in one shot
  if (plan.legal() && layout.legal() && (plan.num_shards == group_size || whole)) return;
  throw std::invalid_argument(std::string(op) + ": a plan of " + std::to_string(plan.count) +
                              " elements in " + std::to_string(plan.num_shards) + " shards of " +
                              std::to_string(plan.chunks_per_shard) + " chunks with edges of " +
                              std::to_string(plan.tile) + ", in " + std::to_string(num_phases) +
                              " phases, is illegal for a group of " + std::to_string(group_size) +
                              " ranks and " + std::to_string(kNumSignals) + " flags");
}

// Gather of what the plan cuts, own shard first.
//   publish(index, positions)   write this rank's chunk into its workspace
//   consume(index, positions)   the chunk of rank index.shard can be read in that rank's workspace
template <typename Call, typename Publish, typename Consume>
void run_gather(Call& call, const ChunkPlan& plan, Publish&& publish, Consume&& consume) {
  require_legal("gather", plan, 1, call.size());
  const auto layout = SignalLayout::of(plan, 1);
  for (int64_t chunk = 0; chunk < plan.chunks_per_shard; ++chunk) {
    const ChunkIndex index{call.rank(), chunk};
    if (const Range positions = plan.chunk(index); positions.size() > 0) publish(index, positions);
    call.signal(layout.flag(0, index));
  }
  for (int64_t step = 0; step < plan.num_chunks(); ++step) {
    const ChunkIndex index = plan.gather_visit(call.rank(), step);
    call.wait(index.shard, layout.flag(0, index));
    if (const Range positions = plan.chunk(index); positions.size() > 0) consume(index, positions);
  }
}

// Writes this rank's addends of all chunks, those for peers first, and signals each chunk.
template <typename Call, typename Produce>
void produce_addends(Call& call, const ChunkPlan& plan, const SignalLayout& layout,
                     Produce&& produce) {
  for (int64_t step = 0; step < plan.num_chunks(); ++step) {
    const ChunkIndex index = plan.scatter_visit(call.rank(), step);
    if (const Range positions = plan.chunk(index); positions.size() > 0) produce(index, positions);
    call.signal(layout.flag(0, index));
  }
}

// Returns once all ranks' addends of a chunk are there.
template <typename Call>
void await_addends(Call& call, const SignalLayout& layout, ChunkIndex index) {
  for (int64_t source = 0; source < call.size(); ++source) {
    call.wait(source, layout.flag(0, index));
  }
}

// Runs the second half of a reduce-scatter: this rank adds up its own chunks.
template <typename Call, typename Reduce>
void finish_reduce_scatter(Call& call, const ChunkPlan& plan, const SignalLayout& layout,
                           Reduce&& reduce) {
  for (int64_t chunk = 0; chunk < plan.chunks_per_shard; ++chunk) {
    const ChunkIndex index{call.rank(), chunk};
    await_addends(call, layout, index);
    if (const Range positions = plan.chunk(index); positions.size() > 0) reduce(index, positions);
  }
}

// Runs the second half of an all-reduce: this rank adds up its chunks, and collects what the others
// added up.
template <typename Call, typename Reduce, typename Collect>
void finish_all_reduce(Call& call, const ChunkPlan& plan, const SignalLayout& layout,
                       Reduce&& reduce, Collect&& collect) {
  const bool one_shot = plan.num_shards == 1;
  for (int64_t chunk = 0; chunk < plan.chunks_per_shard; ++chunk) {
    const ChunkIndex index{one_shot ? 0 : call.rank(), chunk};
    await_addends(call, layout, index);
    if (const Range positions = plan.chunk(index); positions.size() > 0) reduce(index, positions);
    if (!one_shot) call.signal(layout.flag(1, index));
  }
  if (one_shot) return;
  for (int64_t step = 0; step < plan.num_chunks(); ++step) {
    const ChunkIndex index = plan.gather_visit(call.rank(), step);
    call.wait(index.shard, layout.flag(1, index));
    if (const Range positions = plan.chunk(index); positions.size() > 0) collect(index, positions);
  }
}

// Sum over ranks, a shard of it on each.
//   produce(index, positions)   write this rank's addend for rank index.shard into its workspace
//   reduce(index, positions)    add up all ranks' addends of the own chunk, in rank order
template <typename Call, typename Produce, typename Reduce>
void run_reduce_scatter(Call& call, const ChunkPlan& plan, Produce&& produce, Reduce&& reduce) {
  require_legal("reduce_scatter", plan, 1, call.size());
  const auto layout = SignalLayout::of(plan, 1);
  produce_addends(call, plan, layout, produce);
  finish_reduce_scatter(call, plan, layout, reduce);
}

// Sum over ranks, all of it on each. With a shard per rank, each rank adds up its shard and all
// collect the sums; with num_shards = 1 every rank adds up everything, which saves a round of
// signals. The additions are the same, so the bits are.
//   produce(index, positions)   write this rank's addend into its workspace
//   reduce(index, positions)    add up all ranks' addends, in rank order: with a shard per rank
//                               into the part of the workspace that holds sums, else the result
//   collect(index, positions)   copy the sum from the workspace of rank index.shard (not called
//                               with num_shards = 1)
template <typename Call, typename Produce, typename Reduce, typename Collect>
void run_all_reduce(Call& call, const ChunkPlan& plan, Produce&& produce, Reduce&& reduce,
                    Collect&& collect) {
  require_legal("all_reduce", plan, 2, call.size());
  const auto layout = SignalLayout::of(plan, 2);
  produce_addends(call, plan, layout, produce);
  finish_all_reduce(call, plan, layout, reduce, collect);
}

}  // namespace axonn::comm
