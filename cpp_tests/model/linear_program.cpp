#include "model/linear_program.h"

#include "model/recorded_parts.h"

namespace axonn::comm {
namespace {

// Calls the orders of core/symmetric/fused_order.h as ops/cpu/linear.cpp does, without tensors.
struct RecordedPass {
  using Results = std::array<Nothing, 3>;
  using Sizes = RecordedGather::Sizes;
  using RecordedFactor = Factor<RecordedGather>;

  const LinearPass& pass;
  Program& program;

  RecordedCall open(Caller& group) const { return {group, program}; }
  static Nothing nothing() { return {}; }
  void multiply(size_t product, RecordedSum& out, RecordedFactor a, RecordedFactor b) const {
    if (pass.joins[2 * product]) a.matrix.join();
    if (pass.joins[2 * product + 1]) b.matrix.join();
    multiply_into(out, [&](Nothing, Range rows, Range columns) {
      visit_tiles(rows, columns, a, b, [](Range, Range, Nothing, Nothing, bool) {});
    });
  }
  Drain drain(int64_t dim) const {
    if (!pass.sharded) return Drain::kAllReduce;
    return dim == 0 ? Drain::kScatterRows : Drain::kScatterColumns;
  }
  static Sizes shard(int64_t rows, int64_t columns, int64_t dim, const Caller& axis) {
    return {dim == 0 ? rows / axis.size : rows, dim == 1 ? columns / axis.size : columns};
  }
};

struct Forward : RecordedPass {
  Caller &z, &r, &s;
  bool keeps_x;
  bool keeps_weight;

  RecordedGather gather_weight(RecordedCall& call) const {
    return {call, shard(pass.features, pass.in_features, 0, z), 0};
  }
  RecordedGather gather_x(RecordedCall& call) const {
    return {call, shard(pass.rows, pass.in_features, pass.gather_dim, r), pass.gather_dim};
  }
  RecordedSum sum_y(RecordedCall& call) const {
    return {call,          pass.rows,           pass.features, drain(pass.scatter_dim),
            pass.one_shot, pass.in_one_piece[0]};
  }
};

struct Backward : RecordedPass {
  const BackwardGroups<Caller>& groups;
  Caller &s, &z, &r;
  const std::array<bool, 3>& mask;

  RecordedGather gather_dy(RecordedCall& call) const {
    const auto sizes = shard(pass.rows, pass.features, pass.scatter_dim, groups.dy);
    return {call, sizes, pass.scatter_dim};
  }
  RecordedGather gather_weight(RecordedCall& call) const {
    const auto sizes = shard(pass.features, pass.in_features, 0, groups.weight);
    return RecordedGather::over(groups.weight, call, sizes, 0);
  }
  RecordedGather gather_x(RecordedCall& call) const {
    const auto sizes = shard(pass.rows, pass.in_features, pass.gather_dim, groups.x);
    return RecordedGather::over(groups.x, call, sizes, pass.gather_dim);
  }
  RecordedSum sum_dx(RecordedCall& call) const {
    return {call,          pass.rows,           pass.in_features, drain(pass.gather_dim),
            pass.one_shot, pass.in_one_piece[0]};
  }
  RecordedSum sum_dweight(RecordedCall& call) const {
    return {call,  pass.features,       pass.in_features, Drain::kScatterRows,
            false, pass.in_one_piece[1]};
  }
  static Nothing column_sums(RecordedGather& dy) {
    for (int64_t part = 0; part < dy.num_parts(); ++part) dy.part(part);
    return {};
  }
};

}  // namespace

Program linear_program(const LinearPass& pass, const LinearAxes& axes) {
  Program program;
  Caller alone{0, 1, 0};
  if (pass.kind == LinearPass::Kind::kForward) {
    Caller& r = pass.sharded ? axes.r : alone;
    Forward forward{{pass, program},
                    axes.z,
                    r,
                    axes.s,
                    pass.save_input && r.size > 1,
                    pass.save_weight && axes.z.size > 1};
    forward_in_order(forward);
  } else {
    const BackwardGroups<Caller> groups(axes.r, axes.s, axes.z, alone, pass.sharded, pass.mask,
                                        pass.save_input, pass.save_weight);
    Backward backward{{pass, program}, groups, groups.dy, groups.z, groups.r, pass.mask};
    backward_in_order(backward);
  }
  return program;
}

}  // namespace axonn::comm
