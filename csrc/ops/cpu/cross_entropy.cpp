// The rows of cross-entropy on the CPU. One thread computes a whole row, so that no result depends
// on the number of threads.
#include "core/numeric/cross_entropy.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "ops/cross_entropy.h"

namespace axonn::ops::cpu {
namespace {

constexpr int64_t kGrain = 32768;  // with fewer logits, a thread costs more than it saves

// The rows of one rank's logits and their labels.
struct Rows {
  const std::byte* logits;
  const int64_t* labels;
  int64_t row_bytes, rows, columns, first_column, ignore_index;
  kernels::DataType dtype;

  static Rows of(const at::Tensor& logits, const at::Tensor& labels, int64_t first_column,
                 int64_t ignore_index) {
    const auto dtype = logits_dtype(logits);
    return {static_cast<const std::byte*>(logits.const_data_ptr()),
            labels.const_data_ptr<int64_t>(),
            logits.stride(0) * kernels::size_of(dtype),
            logits.size(0),
            logits.size(1),
            first_column,
            ignore_index,
            dtype};
  }
  const std::byte* row(int64_t r) const { return logits + r * row_bytes; }
  bool has_label(int64_t r) const { return labels[r] != ignore_index; }
  // The label's column, or -1 if another rank has it.
  int64_t label(int64_t r) const {
    const int64_t column = labels[r] - first_column;
    return column >= 0 && column < columns ? column : -1;
  }
  template <typename Function>
  void for_each(const Function& function) const {
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns));
    at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) function(r);
    });
  }
};

template <typename T>
void scan(const Rows& rows, T* top, T* sum, T* label_logit) {
  rows.for_each([&](int64_t r) {
    if (!rows.has_label(r)) {
      top[r] = 0, sum[r] = 1, label_logit[r] = 0;
      return;
    }
    const auto found = kernels::scan_logits(rows.row(r), rows.columns, rows.dtype);
    const int64_t label = rows.label(r);
    top[r] = static_cast<T>(found.top);
    sum[r] = static_cast<T>(found.sum);
    label_logit[r] =
        label < 0 ? T{0} : static_cast<T>(kernels::logit_at(rows.row(r), label, rows.dtype));
  });
}

template <typename T>
void gradient(const Rows& rows, const T* dy, const T* top, const T* sum, std::byte* out,
              int64_t out_row_bytes) {
  rows.for_each([&](int64_t r) {
    std::byte* target = out + r * out_row_bytes;
    if (!rows.has_label(r)) {
      std::memset(target, 0, static_cast<size_t>(rows.columns * kernels::size_of(rows.dtype)));
      return;
    }
    kernels::cross_entropy_gradient(target, rows.row(r), rows.columns, rows.dtype, {top[r], sum[r]},
                                    dy[r], rows.label(r));
  });
}

at::Tensor cross_entropy_scan(const at::Tensor& logits, const at::Tensor& labels,
                              int64_t first_column, int64_t ignore_index) {
  auto found = at::empty({3, logits.size(0)}, logits.options().dtype(statistics_dtype(logits)));
  const auto rows = Rows::of(logits, labels, first_column, ignore_index);
  const auto run = [&](auto* data) { scan(rows, data, data + rows.rows, data + 2 * rows.rows); };
  if (found.scalar_type() == at::kDouble) {
    run(found.mutable_data_ptr<double>());
  } else {
    run(found.mutable_data_ptr<float>());
  }
  return found;
}

void cross_entropy_gradient(const at::Tensor& dy, const at::Tensor& logits,
                            const at::Tensor& labels, const at::Tensor& statistics,
                            int64_t first_column, int64_t ignore_index, const at::Tensor& out) {
  const auto rows = Rows::of(logits, labels, first_column, ignore_index);
  auto* target = static_cast<std::byte*>(out.mutable_data_ptr());
  const int64_t out_row_bytes = out.stride(0) * kernels::size_of(rows.dtype);
  const auto run = [&](const auto* dys, const auto* tops) {
    gradient(rows, dys, tops, tops + rows.rows, target, out_row_bytes);
  };
  if (statistics.scalar_type() == at::kDouble) {
    run(dy.const_data_ptr<double>(), statistics.const_data_ptr<double>());
  } else {
    run(dy.const_data_ptr<float>(), statistics.const_data_ptr<float>());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(axonn, CPU, m) {
  m.impl("_cross_entropy_scan", &cross_entropy_scan);
  m.impl("_cross_entropy_gradient", &cross_entropy_gradient);
}

}  // namespace axonn::ops::cpu
