#include "model/linear_program.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "core/schedule/chunk_plan.h"
#include "core/symmetric/protocol.h"
#include "core/symmetric/signal_layout.h"

namespace axonn::comm {
namespace {

// --- As in ops/cpu/fused.h -----------------------------------------------------------------------

class FusedCall {
 public:
  FusedCall(Caller& group, Program& program) : group_(group), program_(program) {
    if (group.size == 1) return;
    ++group.epoch;
    append(begin_program(group));
  }
  ~FusedCall() {
    if (group_.size > 1) append(complete_program(group_));
  }
  FusedCall(const FusedCall&) = delete;
  FusedCall& operator=(const FusedCall&) = delete;

  int64_t rank() const { return group_.rank; }
  int64_t size() const { return group_.size; }
  Recorder take_signals(const SignalLayout& layout) {
    return {group_, program_, std::exchange(next_flag_, next_flag_ + layout.num_flags())};
  }

 private:
  void append(const Program& steps) { program_.insert(program_.end(), steps.begin(), steps.end()); }

  const Caller& group_;
  Program& program_;
  int64_t next_flag_ = 0;
};

using Sizes = std::array<int64_t, 2>;

// `sizes` are those of the shard. A rank that looks at a part reads it, and reads its own part
// locally.
class Gathered {
 public:
  explicit Gathered(Sizes whole) : sizes_(whole) {}
  Gathered(FusedCall& call, Sizes shard, int64_t dim)
      : sizes_(shard), dim_(dim), rank_(call.rank()), here_(call.size()) {
    here_[rank_] = true;
    if (call.size() == 1) return;
    signals_ = call.take_signals({1, call.size(), 1});
    signals_->write(rank_);
    signals_->signal(rank_);
  }
  static Gathered over(const Caller& axis, FusedCall& call, Sizes sizes, int64_t dim) {
    return axis.size > 1 ? Gathered(call, sizes, dim) : Gathered(sizes);
  }

  int64_t dim() const { return dim_; }
  int64_t num_parts() const { return static_cast<int64_t>(here_.size()); }
  Range range(int64_t part) const { return {part * sizes_[dim_], (part + 1) * sizes_[dim_]}; }
  int64_t size(int64_t d) const { return sizes_[d] * (d == dim_ ? num_parts() : 1); }
  int64_t own_first(int64_t step) const { return comm::own_first(rank_, num_parts(), step); }
  void part(int64_t index) {
    if (!here_[index]) signals_->wait(index, index);
    here_[index] = true;
    if (index != rank_) signals_->read(index, index);
  }
  void join() {
    if (num_parts() == 1) return;
    for (int64_t step = 0; step < num_parts(); ++step) part(own_first(step));
    sizes_[dim_] *= num_parts();
    rank_ = 0;
    here_ = {true};
  }

 private:
  Sizes sizes_;
  int64_t dim_ = 0;
  int64_t rank_ = 0;
  std::vector<bool> here_ = {true};  // by rank
  std::optional<Recorder> signals_;
};

enum class Drain { kScatterRows, kScatterColumns, kAllReduce };

// The own part of a scatter has no slot, but counts as one.
class Drained {
 public:
  Drained(FusedCall& call, int64_t rows, int64_t columns, Drain drain, bool one_shot,
          bool in_one_piece)
      : rows_(rows),
        columns_(columns),
        drain_(drain),
        in_one_piece_(call.size() > 1 && in_one_piece && drain != Drain::kScatterColumns),
        rank_(call.rank()),
        plan_{drain == Drain::kScatterColumns ? columns : rows,
              drain == Drain::kAllReduce && one_shot ? 1 : call.size()} {
    if (call.size() > 1) signals_ = call.take_signals(layout());
  }

  int64_t num_parts() const { return plan_.num_shards; }
  int64_t own_last(int64_t step) const { return plan_.scatter_visit(rank_, step).shard; }
  Range rows(int64_t part) const {
    return drain_ == Drain::kScatterColumns ? Range{0, rows_} : plan_.shard(part);
  }
  Range columns(int64_t part) const {
    return drain_ == Drain::kScatterColumns ? plan_.shard(part) : Range{0, columns_};
  }
  bool in_one_piece() const { return in_one_piece_; }
  Range all_rows() const { return {0, rows_}; }
  Range all_columns() const { return {0, columns_}; }
  void slot(int64_t part) {
    if (signals_) signals_->write(layout().flag(0, {part, 0}));
  }
  void done(int64_t part) {
    if (signals_) signals_->signal(layout().flag(0, {part, 0}));
  }
  void finish() {
    if (!signals_) return;
    const auto reduce = [&](ChunkIndex index) { signals_->add_all(layout().flag(0, index)); };
    if (drain_ != Drain::kAllReduce) {
      finish_reduce_scatter(*signals_, plan_, layout(),
                            [&](ChunkIndex index, Range) { reduce(index); });
      return;
    }
    finish_all_reduce(
        *signals_, plan_, layout(),
        [&](ChunkIndex index, Range) {
          reduce(index);
          if (num_parts() > 1) signals_->write(layout().flag(1, index));
        },
        [&](ChunkIndex index, Range) { signals_->read(index.shard, layout().flag(1, index)); });
  }

 private:
  SignalLayout layout() const {
    return SignalLayout::of(plan_, drain_ == Drain::kAllReduce ? 2 : 1);
  }

  int64_t rows_;
  int64_t columns_;
  Drain drain_;
  bool in_one_piece_;
  int64_t rank_;
  ChunkPlan plan_;
  std::optional<Recorder> signals_;
};

struct Factor {
  Gathered& matrix;
  bool transposed = false;

  int64_t dim() const { return transposed ? 1 - matrix.dim() : matrix.dim(); }
  int64_t size(int64_t d) const { return matrix.size(transposed ? 1 - d : d); }
  void block(Range rows, Range columns) const {
    const Range range = dim() == 0 ? rows : columns;
    const int64_t length = matrix.range(0).size();
    matrix.part(length > 0 ? range.begin / length : 0);
  }
};

// --- As in ops/cpu/product.cpp -------------------------------------------------------------------

Range intersect(Range a, Range b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

std::vector<Range> cuts(const Factor& factor, int64_t dim, bool own_first) {
  std::vector<Range> ranges;
  const int64_t count = factor.dim() == dim ? factor.matrix.num_parts() : 1;
  if (count == 1) return {{0, factor.size(dim)}};
  for (int64_t i = 0; i < count; ++i) {
    ranges.push_back(factor.matrix.range(own_first ? factor.matrix.own_first(i) : i));
  }
  return ranges;
}

std::vector<Range> inner_cuts(const Factor& a, const Factor& b) {
  std::vector<Range> ranges;
  for (const auto& x : cuts(a, 1, false)) {
    for (const auto& y : cuts(b, 0, false)) {
      if (const auto both = intersect(x, y); both.size() > 0) ranges.push_back(both);
    }
  }
  if (ranges.empty()) ranges.push_back({0, 0});
  return ranges;
}

void multiply(Range rows, Range columns, Factor a, Factor b) {
  const auto inner = inner_cuts(a, b);
  for (const auto& row_part : cuts(a, 0, true)) {
    const auto r = intersect(row_part, rows);
    if (r.size() == 0) continue;
    for (const auto& column_part : cuts(b, 1, true)) {
      const auto c = intersect(column_part, columns);
      if (c.size() == 0) continue;
      for (const auto& k : inner) {
        a.block(r, k);
        b.block(k, c);
      }
    }
  }
}

void multiply(Drained& out, Factor a, Factor b, bool join_a, bool join_b) {
  if (join_a) a.matrix.join();
  if (join_b) b.matrix.join();
  if (out.in_one_piece()) {
    for (int64_t part = 0; part < out.num_parts(); ++part) out.slot(part);
    multiply(out.all_rows(), out.all_columns(), a, b);
  }
  for (int64_t step = 0; step < out.num_parts(); ++step) {
    const int64_t part = out.own_last(step);
    if (!out.in_one_piece()) {
      out.slot(part);
      multiply(out.rows(part), out.columns(part), a, b);
    }
    out.done(part);
  }
}

// --- As in ops/cpu/linear.cpp --------------------------------------------------------------------

Drain drain(const LinearPass& pass, int64_t dim) {
  if (!pass.sharded) return Drain::kAllReduce;
  return dim == 0 ? Drain::kScatterRows : Drain::kScatterColumns;
}

Sizes shard(int64_t rows, int64_t columns, int64_t dim, const Caller& axis) {
  return {dim == 0 ? rows / axis.size : rows, dim == 1 ? columns / axis.size : columns};
}

void fused_forward(const LinearPass& pass, const LinearAxes& axes, Program& program) {
  Caller alone{0, 1, 0};
  auto& r = pass.sharded ? axes.r : alone;

  FusedCall z_call(axes.z, program);
  Gathered weight(z_call, shard(pass.features, pass.in_features, 0, axes.z), 0);
  FusedCall r_call(r, program);
  Gathered x(r_call, shard(pass.rows, pass.in_features, pass.gather_dim, r), pass.gather_dim);
  FusedCall s_call(axes.s, program);
  Drained y(s_call, pass.rows, pass.features, drain(pass, pass.scatter_dim), pass.one_shot,
            pass.in_one_piece[0]);

  multiply(y, {x}, {weight, /*transposed=*/true}, pass.joins[0], pass.joins[1]);
  y.finish();
  if (pass.save_input && r.size > 1) x.join();
  if (pass.save_weight && axes.z.size > 1) weight.join();
}

void column_sums(Gathered& dy) {
  for (int64_t part = 0; part < dy.num_parts(); ++part) dy.part(part);
}

void fused_backward(const LinearPass& pass, const LinearAxes& axes, Program& program) {
  Caller alone{0, 1, 0};
  const auto& mask = pass.mask;
  auto& x_axis = mask[1] && pass.sharded && !pass.save_input ? axes.r : alone;
  auto& dx_axis = mask[0] ? axes.r : alone;
  auto& weight_axis = mask[0] && !pass.save_weight ? axes.z : alone;
  auto& dweight_axis = mask[1] ? axes.z : alone;
  auto& dy_axis = pass.sharded ? axes.s : alone;

  FusedCall s_call(dy_axis, program);
  Gathered dy(s_call, shard(pass.rows, pass.features, pass.scatter_dim, dy_axis), pass.scatter_dim);
  FusedCall z_call(mask[1] ? dweight_axis : weight_axis, program);
  auto weight = Gathered::over(weight_axis, z_call,
                               shard(pass.features, pass.in_features, 0, weight_axis), 0);
  FusedCall r_call(mask[0] ? dx_axis : x_axis, program);
  auto x = Gathered::over(
      x_axis, r_call, shard(pass.rows, pass.in_features, pass.gather_dim, x_axis), pass.gather_dim);

  std::optional<Drained> dx, dweight;
  if (mask[0]) {
    dx.emplace(r_call, pass.rows, pass.in_features, drain(pass, pass.gather_dim), pass.one_shot,
               pass.in_one_piece[0]);
    multiply(*dx, {dy}, {weight}, pass.joins[0], pass.joins[1]);
  }
  if (mask[1]) {
    dweight.emplace(z_call, pass.features, pass.in_features, Drain::kScatterRows,
                    /*one_shot=*/false, pass.in_one_piece[1]);
    multiply(*dweight, {dy, /*transposed=*/true}, {x}, pass.joins[2], pass.joins[3]);
  }
  if (mask[0]) dx->finish();
  if (mask[1]) dweight->finish();
  if (mask[2]) column_sums(dy);
}

}  // namespace

Program linear_program(const LinearPass& pass, const LinearAxes& axes) {
  Program program;
  if (pass.kind == LinearPass::Kind::kForward) {
    fused_forward(pass, axes, program);
  } else {
    fused_backward(pass, axes, program);
  }
  return program;
}

}  // namespace axonn::comm
