// Products of matrices that may be gathered, into sums that may be drained. This file decides which
// tiles are multiplied, in which order, and from which pieces.
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <c10/core/SymIntArrayRef.h>

#include <algorithm>
#include <utility>

#include "ops/checks.h"
#include "ops/cpu/fused.h"

namespace axonn::ops::cpu {
namespace {

comm::Range intersect(comm::Range a, comm::Range b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

// Returns the ranges into which the parts of a factor cut it along `dim`, or one range if it is not
// cut along it.
std::vector<comm::Range> cuts(const Factor& factor, int64_t dim, bool own_first) {
  std::vector<comm::Range> ranges;
  const int64_t count = factor.dim() == dim ? factor.matrix.num_parts() : 1;
  if (count == 1) return {{0, factor.size(dim)}};
  for (int64_t i = 0; i < count; ++i) {
    ranges.push_back(factor.matrix.range(own_first ? factor.matrix.own_first(i) : i));
  }
  return ranges;
}

// Returns the ranges of the summed dimension, cut wherever one of the factors is, in rank order on
// every rank.
std::vector<comm::Range> inner_cuts(const Factor& a, const Factor& b) {
  std::vector<comm::Range> ranges;
  for (const auto& x : cuts(a, 1, false)) {
    for (const auto& y : cuts(b, 0, false)) {
      if (const auto both = intersect(x, y); both.size() > 0) ranges.push_back(both);
    }
  }
  if (ranges.empty()) ranges.push_back({0, 0});
  return ranges;
}

// This makes one dispatcher step, where narrow, narrow and t would make six.
at::Tensor block_of(const at::Tensor& t, comm::Range rows, comm::Range columns,
                    bool transposed = false) {
  int64_t sizes[] = {rows.size(), columns.size()};
  int64_t strides[] = {t.stride(0), t.stride(1)};
  const int64_t offset = t.storage_offset() + rows.begin * strides[0] + columns.begin * strides[1];
  if (transposed) {
    std::swap(sizes[0], sizes[1]);
    std::swap(strides[0], strides[1]);
  }
  return at::cpu::as_strided(t, sizes, strides, offset);
}

comm::Range shift(comm::Range range, int64_t origin) {
  return {range.begin - origin, range.end - origin};
}

// Copies the parts of a factor into one piece where it would cost more to multiply them one by one.
// For every further part the library packs, or reads and writes, `elements_a_part` elements once
// more.
void join_if_cheaper(Factor& factor, int64_t elements_a_part) {
  constexpr int64_t kGain = 2;  // at least: a copy has to wait for the last part
  const int64_t parts = factor.matrix.num_parts();
  const int64_t copied = factor.size(0) * factor.size(1) / parts * (parts - 1);
  if (kGain * copied < (parts - 1) * elements_a_part) factor.matrix.join();
}

void join_where_it_pays(Factor& a, Factor& b, const at::TensorOptions& options) {
  // Sums over parts are rounded to the tensors' dtype in between, so parts are joined if the dtype
  // has less precision than fp32.
  const bool rounds = is_16_bit_float(c10::typeMetaToScalarType(options.dtype()));
  const int64_t rows = a.size(0), inner = a.size(1), columns = b.size(1);
  if (rounds && a.dim() == 1) a.matrix.join();
  if (rounds && b.dim() == 0) b.matrix.join();
  join_if_cheaper(a, a.dim() == 0 ? inner * columns : 2 * rows * columns);
  join_if_cheaper(b, b.dim() == 1 ? rows * inner : 2 * rows * columns);
}

}  // namespace

at::Tensor Factor::block(comm::Range rows, comm::Range columns) const {
  if (transposed) std::swap(rows, columns);
  auto& range = matrix.dim() == 0 ? rows : columns;
  const int64_t length = matrix.range(0).size();
  const int64_t part = length > 0 ? range.begin / length : 0;
  range = shift(range, part * length);
  return block_of(matrix.part(part), rows, columns, transposed);
}

namespace {

// Sets out = (a @ b)[rows, columns].
void multiply(const at::Tensor& out, comm::Range rows, comm::Range columns, Factor a, Factor b) {
  TORCH_INTERNAL_ASSERT(a.size(1) == b.size(0), a.size(1), " and ", b.size(0));
  const auto inner = inner_cuts(a, b);
  for (const auto& row_part : cuts(a, 0, true)) {
    const auto r = intersect(row_part, rows);
    if (r.size() == 0) continue;
    for (const auto& column_part : cuts(b, 1, true)) {
      const auto c = intersect(column_part, columns);
      if (c.size() == 0) continue;
      auto tile = block_of(out, shift(r, rows.begin), shift(c, columns.begin));
      bool first = true;
      for (const auto& k : inner) {
        if (first) {
          at::cpu::mm_out(tile, a.block(r, k), b.block(k, c));
        } else {
          at::cpu::addmm_out(tile, tile, a.block(r, k), b.block(k, c));
        }
        first = false;
      }
    }
  }
}

}  // namespace

void multiply(Drained& out, Factor a, Factor b) {
  join_where_it_pays(a, b, out.options());
  if (out.in_one_piece()) multiply(out.all_slots(), {0, a.size(0)}, {0, b.size(1)}, a, b);
  for (int64_t step = 0; step < out.num_parts(); ++step) {
    const int64_t part = out.own_last(step);
    if (!out.in_one_piece()) multiply(out.slot(part), out.rows(part), out.columns(part), a, b);
    out.done(part);
  }
}

at::Tensor multiply(Factor a, Factor b) {
  const int64_t rows = a.size(0), columns = b.size(1);
  const auto options = a.matrix.options();
  join_where_it_pays(a, b, options);
  auto out = at::empty({rows, columns}, options);
  multiply(out, {0, rows}, {0, columns}, a, b);
  return out;
}

}  // namespace axonn::ops::cpu
