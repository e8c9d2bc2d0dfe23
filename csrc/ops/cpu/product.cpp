// Multiplies matrices that may be gathered, into sums that may be drained. This file decides which
// matrices are first copied into one piece, and multiplies the tiles.
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

// Takes one dispatcher step, where narrow, narrow and t would take six.
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

// Copies the parts of a factor into one piece if it would cost more to multiply them one by one.
// For each further part the library packs, or reads and writes, `elements_a_part` elements once
// more.
void join_if_cheaper(Factor& factor, int64_t elements_a_part) {
  constexpr int64_t kGain = 2;  // required at least, because a copy has to wait for the last part
  const int64_t parts = factor.matrix.num_parts();
  const int64_t copied = factor.size(0) * factor.size(1) / parts * (parts - 1);
  if (kGain * copied < (parts - 1) * elements_a_part) factor.matrix.join();
}

void join_where_it_pays(Factor& a, Factor& b, const at::TensorOptions& options) {
  // Sums over parts are rounded to the tensors' dtype after each part, so parts are joined if that
  // dtype is less precise than fp32.
  const bool rounds = is_16_bit_float(c10::typeMetaToScalarType(options.dtype()));
  const int64_t rows = a.size(0), inner = a.size(1), columns = b.size(1);
  if (rounds && a.dim() == 1) a.matrix.join();
  if (rounds && b.dim() == 0) b.matrix.join();
  join_if_cheaper(a, a.dim() == 0 ? inner * columns : 2 * rows * columns);
  join_if_cheaper(b, b.dim() == 1 ? rows * inner : 2 * rows * columns);
}

}  // namespace

at::Tensor Gathered::block(int64_t index, comm::Range rows, comm::Range columns, bool transposed) {
  return block_of(part(index), rows, columns, transposed);
}

namespace {

// Sets out = (a @ b)[rows, columns].
void multiply(const at::Tensor& out, comm::Range rows, comm::Range columns, Factor a, Factor b) {
  TORCH_INTERNAL_ASSERT(a.size(1) == b.size(0), a.size(1), " and ", b.size(0));
  comm::visit_tiles(rows, columns, a, b,
                    [&](comm::Range r, comm::Range c, const at::Tensor& left,
                        const at::Tensor& right, bool is_first) {
                      auto tile = block_of(out, r, c);
                      if (is_first) {
                        at::cpu::mm_out(tile, left, right);
                      } else {
                        at::cpu::addmm_out(tile, tile, left, right);
                      }
                    });
}

}  // namespace

void multiply(Drained& out, Factor a, Factor b) {
  join_where_it_pays(a, b, out.options());
  comm::multiply_into(out, [&](const at::Tensor& slots, comm::Range rows, comm::Range columns) {
    multiply(slots, rows, columns, a, b);
  });
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
