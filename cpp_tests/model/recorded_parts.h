// What ops/cpu/fused.h has on tensors, on a recorder: a call, and what is gathered and summed in
// it. The order of writes, signals and waits is that of core/symmetric/fused_order.h, whose code
// ops/cpu runs.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include "core/symmetric/fused_order.h"
#include "model/protocol_program.h"

namespace axonn::comm {

struct Nothing {};  // stands in for a tensor

// One group's call; a group of one rank needs no call.
class RecordedCall {
 public:
  RecordedCall(Caller& group, Program& program) : group_(group), program_(program) {
    if (group.size == 1) return;
    ++group.epoch;
    append(begin_program(group));
  }
  ~RecordedCall() {
    if (group_.size > 1) append(complete_program(group_));
  }
  RecordedCall(const RecordedCall&) = delete;
  RecordedCall& operator=(const RecordedCall&) = delete;

  int64_t rank() const { return group_.rank; }
  int64_t size() const { return group_.size; }
  Recorder take_signals(const SignalLayout& layout) {
    return {group_, program_, std::exchange(next_flag_, next_flag_ + layout.num_flags())};
  }
  void compare() {}  // waits only for the peers' opening of the call

 private:
  void append(const Program& steps) { program_.insert(program_.end(), steps.begin(), steps.end()); }

  const Caller& group_;
  Program& program_;
  int64_t next_flag_ = 0;
};

// Looking at a peer's part records a read; a rank's own part is local and needs none.
class RecordedGather : public GatheredParts<Recorder> {
 public:
  using Sizes = std::array<int64_t, 2>;

  explicit RecordedGather(Sizes whole) : GatheredParts(whole[0]), sizes_(whole) {}
  RecordedGather(RecordedCall& call, Sizes shard, int64_t dim)
      : GatheredParts(shard[static_cast<size_t>(dim)], dim, call.rank(), call.size()),
        sizes_(shard) {
    if (call.size() == 1) return;
    recorder_ = call.take_signals(layout(call.size()));
    publish(*recorder_, [&] { recorder_->write(call.rank()); });
  }
  static RecordedGather over(const Caller& axis, RecordedCall& call, Sizes sizes, int64_t dim) {
    return axis.size > 1 ? RecordedGather(call, sizes, dim) : RecordedGather(sizes);
  }

  int64_t size(int64_t d) const {
    return d == dim() ? num_parts() * length() : sizes_[static_cast<size_t>(d)];
  }
  void part(int64_t index) {
    await(index);
    if (index != rank()) recorder_->read(index, index);
  }
  Nothing block(int64_t index, Range, Range, bool) {
    part(index);
    return {};
  }
  void join() {
    if (num_parts() == 1) return;
    visit_own_first([&](int64_t index) { part(index); });
    become_whole();
  }
  Nothing take() {
    join();
    return {};
  }

 private:
  Sizes sizes_;
  std::optional<Recorder> recorder_;
};

class RecordedSum : public SummedParts<Recorder> {
 public:
  RecordedSum(RecordedCall& call, int64_t rows, int64_t columns, Drain drain, bool one_shot,
              bool in_one_piece)
      : SummedParts(rows, columns, drain, call.rank(), call.size(), one_shot),
        in_one_piece_(call.size() > 1 && in_one_piece && drain != Drain::kScatterColumns) {
    if (call.size() == 1) return;
    recorder_ = call.take_signals(layout());
    set_signals(*recorder_);
  }

  bool in_one_piece() const { return in_one_piece_; }
  Nothing slot(int64_t part) {
    if (recorder_) recorder_->write(layout().flag(0, {part, 0}));
    return {};
  }
  Nothing all_slots() {
    for (int64_t part = 0; part < num_parts(); ++part) slot(part);
    return {};
  }
  Nothing finish() {
    if (!recorder_) return {};
    sum(
        [&](int64_t part) {
          recorder_->add_all(layout().flag(0, {part, 0}));
          if (!scatters() && num_parts() > 1) recorder_->write(layout().flag(1, {part, 0}));
        },
        [&](int64_t part) { recorder_->read(part, layout().flag(1, {part, 0})); });
    return {};
  }

 private:
  bool in_one_piece_;
  std::optional<Recorder> recorder_;
};

}  // namespace axonn::comm
