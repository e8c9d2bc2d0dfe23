// The order in which a rank of a fused CPU op publishes, waits, multiplies, signals and sums, and
// in which a Linear opens its calls, without the tensors. ops/cpu runs this code on tensors. The
// tests' simulator runs it on a recorder, to show that no interleaving of ranks deadlocks, reads
// too early or overwrites too early.
//
// `Signals` are the flags of one matrix or sum within a call: size(), signal(flag) and
// wait(peer, flag). Every part is signalled, even an empty one.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/schedule/chunk_plan.h"
#include "core/symmetric/signal_layout.h"

namespace axonn::comm {

// A matrix that is the concatenation, along `dim`, of the shards of all ranks; or a matrix that is
// whole on this rank and has one part.
template <typename Signals>
class GatheredParts {
 public:
  static constexpr SignalLayout layout(int64_t size) { return {1, size, 1}; }

  int64_t dim() const { return dim_; }
  int64_t num_parts() const { return static_cast<int64_t>(here_.size()); }
  int64_t length() const { return length_; }
  Range range(int64_t part) const { return {part * length_, (part + 1) * length_}; }
  // The part at `step` of a walk that begins with this rank's own part.
  int64_t own_first(int64_t step) const { return comm::own_first(rank_, num_parts(), step); }

 protected:
  explicit GatheredParts(int64_t length) : length_(length) {}
  GatheredParts(int64_t length, int64_t dim, int64_t rank, int64_t size)
      : length_(length), dim_(dim), rank_(rank), here_(static_cast<size_t>(size)) {
    here_[static_cast<size_t>(rank)] = true;
  }

  int64_t rank() const { return rank_; }
  // Writes this rank's shard to where peers read it, by write(), and signals it.
  template <typename Write>
  void publish(Signals signals, Write&& write) {
    signals_ = signals;
    write();
    signals_->signal(flag(rank_));
  }
  // Waits for a part, unless it is already here. Returns whether it waited.
  bool await(int64_t part) {
    const auto index = static_cast<size_t>(part);
    if (here_[index]) return false;
    signals_->wait(part, flag(part));
    here_[index] = true;
    return true;
  }
  template <typename Visit>
  void visit_own_first(Visit&& visit) {
    for (int64_t step = 0; step < num_parts(); ++step) visit(own_first(step));
  }
  // The parts were copied into one matrix, which is the only part from now on.
  void become_whole() {
    length_ *= num_parts();
    rank_ = 0;
    here_ = {true};
  }

 private:
  int64_t flag(int64_t part) const { return layout(num_parts()).flag(0, {part, 0}); }

  int64_t length_;  // of a part along `dim`
  int64_t dim_ = 0;
  int64_t rank_ = 0;
  std::vector<bool> here_ = {true};  // by rank
  std::optional<Signals> signals_;   // none without peers
};

// How a sum over ranks is distributed.
enum class Drain { kScatterRows, kScatterColumns, kAllReduce };

// A [rows, columns] product that is summed over ranks: each rank gets its block or, with
// kAllReduce, the whole sum. The product is cut into one part per rank. A one-shot all-reduce has
// one part, which every rank sums; this saves a round of signals. The additions are the same.
template <typename Signals>
class SummedParts {
 public:
  int64_t num_parts() const { return plan_.num_shards; }
  Range rows(int64_t part) const {
    return drain_ == Drain::kScatterColumns ? Range{0, rows_} : plan_.shard(part);
  }
  Range columns(int64_t part) const {
    return drain_ == Drain::kScatterColumns ? plan_.shard(part) : Range{0, columns_};
  }
  Range all_rows() const { return {0, rows_}; }
  Range all_columns() const { return {0, columns_}; }
  // Writes all parts with write(part), first those that peers sum, and signals each.
  template <typename Write>
  void produce(Write&& write) {
    for (int64_t step = 0; step < num_parts(); ++step) {
      const int64_t part = plan_.scatter_visit(rank_, step).shard;
      write(part);
      if (signals_) signals_->signal(layout().flag(0, {part, 0}));
    }
  }

 protected:
  SummedParts(int64_t rows, int64_t columns, Drain drain, int64_t rank, int64_t size, bool one_shot)
      : rows_(rows),
        columns_(columns),
        drain_(drain),
        rank_(rank),
        plan_{drain == Drain::kScatterColumns ? columns : rows,
              drain == Drain::kAllReduce && one_shot ? 1 : size} {}

  void set_signals(Signals signals) { signals_ = signals; }
  bool scatters() const { return drain_ != Drain::kAllReduce; }
  SignalLayout layout() const { return SignalLayout::of(plan_, scatters() ? 1 : 2); }
  // Sums the products of all ranks. Neither function is called for an empty part.
  //   reduce(part)    sum all ranks' addends, in rank order: to where peers read the sum, if an
  //                   all-reduce has several parts, otherwise into the result
  //   collect(part)   copy the sum from the workspace of rank `part`
  template <typename Reduce, typename Collect>
  void sum(Reduce&& reduce, Collect&& collect) {
    const int64_t own = num_parts() == 1 ? 0 : rank_;
    for (int64_t source = 0; source < signals_->size(); ++source) {
      signals_->wait(source, layout().flag(0, {own, 0}));
    }
    if (plan_.shard(own).size() > 0) reduce(own);
    if (scatters() || num_parts() == 1) return;
    signals_->signal(layout().flag(1, {own, 0}));
    for (int64_t step = 0; step < num_parts(); ++step) {
      const int64_t part = plan_.gather_visit(rank_, step).shard;
      signals_->wait(part, layout().flag(1, {part, 0}));
      if (plan_.shard(part).size() > 0) collect(part);
    }
  }

 private:
  int64_t rows_;
  int64_t columns_;
  Drain drain_;
  int64_t rank_;
  ChunkPlan plan_;                  // one shard per part, in one chunk
  std::optional<Signals> signals_;  // none without peers
};

// --- Products ------------------------------------------------------------------------------------

constexpr Range intersect(Range a, Range b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

constexpr Range shift(Range range, int64_t origin) {
  return {range.begin - origin, range.end - origin};
}

// A factor of a product: a gathered matrix as it is, or its transpose.
template <typename Matrix>
struct Factor {
  Matrix& matrix;
  bool transposed = false;

  int64_t dim() const { return transposed ? 1 - matrix.dim() : matrix.dim(); }
  int64_t size(int64_t d) const { return matrix.size(transposed ? 1 - d : d); }
  // Each range must lie in one part.
  auto block(Range rows, Range columns) const {
    if (transposed) std::swap(rows, columns);
    Range& range = matrix.dim() == 0 ? rows : columns;
    const int64_t part = matrix.length() > 0 ? range.begin / matrix.length() : 0;
    range = shift(range, part * matrix.length());
    return matrix.block(part, rows, columns, transposed);
  }
  // The ranges into which the parts cut the factor along `d`, or one range if they do not.
  std::vector<Range> cuts(int64_t d, bool own_first) const {
    const int64_t count = dim() == d ? matrix.num_parts() : 1;
    if (count == 1) return {{0, size(d)}};
    std::vector<Range> ranges;
    for (int64_t i = 0; i < count; ++i) {
      ranges.push_back(matrix.range(own_first ? matrix.own_first(i) : i));
    }
    return ranges;
  }
};

// Returns the ranges of the summed dimension, cut wherever one of the factors is cut, in rank order
// on every rank.
template <typename Matrix>
std::vector<Range> inner_cuts(const Factor<Matrix>& a, const Factor<Matrix>& b) {
  std::vector<Range> ranges;
  for (const auto& x : a.cuts(1, false)) {
    for (const auto& y : b.cuts(0, false)) {
      if (const auto both = intersect(x, y); both.size() > 0) ranges.push_back(both);
    }
  }
  if (ranges.empty()) ranges.push_back({0, 0});
  return ranges;
}

// Calls multiply(rows, columns, left, right, is_first) for each tile of (a @ b)[rows, columns].
// left and right are blocks of the factors, waited for; the first pair sets the tile, and the
// others add to it. The tile's place counts from the start of `rows` and `columns`.
template <typename Matrix, typename Multiply>
void visit_tiles(Range rows, Range columns, Factor<Matrix> a, Factor<Matrix> b,
                 Multiply&& multiply) {
  const auto inner = inner_cuts(a, b);
  for (const auto& row_part : a.cuts(0, true)) {
    const auto r = intersect(row_part, rows);
    if (r.size() == 0) continue;
    for (const auto& column_part : b.cuts(1, true)) {
      const auto c = intersect(column_part, columns);
      if (c.size() == 0) continue;
      bool is_first = true;
      for (const auto& k : inner) {
        const auto left = a.block(r, k);
        multiply(shift(r, rows.begin), shift(c, columns.begin), left, b.block(k, c), is_first);
        is_first = false;
      }
    }
  }
}

// Calls product(slots, rows, columns) for all parts of `out`: for each part's slot or, if parts are
// too small, for all of them at once.
template <typename Sum, typename Product>
void multiply_into(Sum& out, Product&& product) {
  const bool in_one_piece = out.in_one_piece();
  if (in_one_piece) product(out.all_slots(), out.all_rows(), out.all_columns());
  out.produce([&](int64_t part) {
    if (!in_one_piece) product(out.slot(part), out.rows(part), out.columns(part));
  });
}

// --- A Linear ------------------------------------------------------------------------------------
//
// Calls on several groups are open at once. All are opened, and all shards published, before a rank
// waits for anything, so the rank that is furthest behind never waits for a peer that waits for it.
// `Pass` opens calls (open), creates the gathered and summed matrices in them, and multiplies.

template <typename Pass>
typename Pass::Results forward_in_order(Pass& pass) {
  auto z_call = pass.open(pass.z);
  auto weight = pass.gather_weight(z_call);
  auto r_call = pass.open(pass.r);
  auto x = pass.gather_x(r_call);
  auto s_call = pass.open(pass.s);
  auto y = pass.sum_y(s_call);

  pass.multiply(0, y, {x}, {weight, /*transposed=*/true});
  for (auto* call : {&z_call, &r_call}) call->compare();
  return {y.finish(), pass.keeps_x ? x.take() : pass.nothing(),
          pass.keeps_weight ? weight.take() : pass.nothing()};
}

// dX is summed after the product for dW, which gives the addends of dX time to arrive.
template <typename Pass>
typename Pass::Results backward_in_order(Pass& pass) {
  auto s_call = pass.open(pass.s);
  auto dy = pass.gather_dy(s_call);
  auto z_call = pass.open(pass.z);
  auto weight = pass.gather_weight(z_call);
  auto r_call = pass.open(pass.r);
  auto x = pass.gather_x(r_call);

  const auto [wants_dx, wants_dweight, wants_dbias] = pass.mask;
  std::optional<decltype(pass.sum_dx(r_call))> dx, dweight;
  if (wants_dx) {
    dx.emplace(pass.sum_dx(r_call));
    pass.multiply(0, *dx, {dy}, {weight});
  }
  if (wants_dweight) {
    dweight.emplace(pass.sum_dweight(z_call));
    pass.multiply(1, *dweight, {dy, /*transposed=*/true}, {x});
  }
  for (auto* call : {&s_call, &z_call, &r_call}) call->compare();
  return {wants_dx ? dx->finish() : pass.nothing(),
          wants_dweight ? dweight->finish() : pass.nothing(),
          wants_dbias ? pass.column_sums(dy) : pass.nothing()};
}

// The groups of a backward pass: the group over which each matrix moves, and the groups of the
// calls. `alone` is a group of one rank.
template <typename Group>
struct BackwardGroups {
  BackwardGroups(Group& r_axis, Group& s_axis, Group& z_axis, Group& alone, bool sharded,
                 const std::array<bool, 3>& mask, bool x_is_full, bool weight_is_full)
      : dy(sharded ? s_axis : alone),
        x(mask[1] && sharded && !x_is_full ? r_axis : alone),
        dx(mask[0] ? r_axis : alone),
        weight(mask[0] && !weight_is_full ? z_axis : alone),
        dweight(mask[1] ? z_axis : alone),
        r(mask[0] ? dx : x),
        z(mask[1] ? dweight : weight) {}

  Group& dy;
  Group& x;
  Group& dx;
  Group& weight;
  Group& dweight;
  Group& r;
  Group& z;
};

}  // namespace axonn::comm
