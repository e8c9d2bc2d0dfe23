#include <ATen/Parallel.h>
#include <torch/library.h>

#include "ops/goldfish.h"

namespace axonn::ops::cpu {
namespace {

constexpr int64_t kGrain = 4096;  // for fewer targets a thread costs more than it saves

at::Tensor goldfish_labels(const at::Tensor& tokens, const std::optional<at::Tensor>& documents,
                           int64_t k, int64_t h, bool with_target, int64_t ignore_index) {
  const auto call = GoldfishCall::of(tokens, documents, k, h, with_target);
  const auto rows = call.rows();
  auto* out = call.labels.mutable_data_ptr<int64_t>();
  at::parallel_for(0, rows.num_targets(), kGrain, [&](int64_t begin, int64_t end) {
    kernels::goldfish_labels(rows, call.rule, ignore_index, begin, end, out);
  });
  return call.labels;
}

}  // namespace

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl(kGoldfishLabels, &goldfish_labels); }

}  // namespace axonn::ops::cpu
