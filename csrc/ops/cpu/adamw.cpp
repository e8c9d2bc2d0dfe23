// AdamW on the CPU, over many tensors at once, on all threads.
#include "core/numeric/adamw.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "ops/checks.h"

namespace axonn::ops::cpu {
namespace {

constexpr auto kOp = "_adamw_";
// Elements are divided between threads in multiples of this number, which is itself a multiple of
// the vector width and of a cache line.
constexpr int64_t kTask = 16384;
// Masters and moments of this many elements, 12 MB, do not stay in a processor's caches.
constexpr int64_t kPastCaches = int64_t{1} << 20;

// Returns how torch's kernel, for this CPU or as set by ATEN_CPU_CAPABILITY, rounds products.
kernels::Products products_of_torch() {
  return at::get_cpu_capability().starts_with("AVX") ? kernels::Products::kFused
                                                     : kernels::Products::kRounded;
}

void check_like(const char* name, const at::Tensor& t, const at::Tensor& gradient,
                at::ScalarType dtype) {
  TORCH_CHECK_TYPE(t.scalar_type() == dtype, kOp, ": ", name, " must be of ", dtype,
                   " for gradients of ", gradient.scalar_type(), ", got ", t.scalar_type());
  TORCH_CHECK_VALUE(t.numel() == gradient.numel(), kOp, ": ", name, " has ", t.numel(),
                    " elements, but its gradient has ", gradient.numel());
  TORCH_CHECK_VALUE(t.device().is_cpu() && t.is_contiguous(), kOp, ": ", name,
                    " must be contiguous on the CPU, got strides ", t.strides(), " on ",
                    t.device());
}

// Returns the tensors as kernels take them. Raises ValueError or TypeError, naming the tensor.
kernels::AdamWRun checked_run(const at::Tensor& gradient, const at::Tensor& master,
                              const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
                              const at::Tensor& weight) {
  const auto dtype = gradient.scalar_type();
  TORCH_CHECK_TYPE(is_matmul_dtype(dtype), kOp,
                   ": gradients must be of float32, float64, bfloat16 or float16, got ", dtype);
  const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
  check_like("gradient", gradient, gradient, dtype);
  check_like("master", master, gradient, wide);
  check_like("exp_avg", exp_avg, gradient, wide);
  check_like("exp_avg_sq", exp_avg_sq, gradient, wide);
  check_like("weight", weight, gradient, dtype);
  return {gradient.const_data_ptr(),
          master.mutable_data_ptr(),
          exp_avg.mutable_data_ptr(),
          exp_avg_sq.mutable_data_ptr(),
          weight.mutable_data_ptr(),
          gradient.numel(),
          data_type(dtype)};
}

double checked_step(const at::Tensor& step) {
  TORCH_CHECK_VALUE(step.device().is_cpu() && step.scalar_type() == at::kFloat && step.numel() == 1,
                    kOp, ": a step must be one number of float32 on the CPU, got ", step.numel(),
                    " of ", step.scalar_type(), " on ", step.device());
  return *step.const_data_ptr<float>();
}

struct Run {
  kernels::AdamWRun run;
  kernels::AdamWNumbers numbers;
  int64_t first_task;
};

// Runs the tasks [begin, end), which are numbered across all runs.
void update(const std::vector<Run>& runs, bool past_caches, int64_t begin, int64_t end) {
  auto it = std::upper_bound(runs.begin(), runs.end(), begin,
                             [](int64_t task, const Run& run) { return task < run.first_task; });
  for (--it; it != runs.end() && it->first_task < end; ++it) {
    const int64_t from = std::max<int64_t>(0, begin - it->first_task) * kTask;
    const int64_t to = std::min(it->run.numel, (end - it->first_task) * kTask);
    if (from < to) kernels::adamw(it->run, it->numbers, past_caches, from, to);
  }
}

void adamw(at::TensorList gradients, at::TensorList masters, at::TensorList exp_avgs,
           at::TensorList exp_avg_sqs, at::TensorList weights, at::TensorList steps, double lr,
           double beta1, double beta2, double eps, double weight_decay, double gradient_factor) {
  const size_t count = gradients.size();
  TORCH_CHECK_VALUE(
      masters.size() == count && exp_avgs.size() == count && exp_avg_sqs.size() == count &&
          weights.size() == count && steps.size() == count,
      kOp, ": the lists must be of one length, got ", count, " gradients, ", masters.size(),
      " masters, ", exp_avgs.size(), " exp_avgs, ", exp_avg_sqs.size(), " exp_avg_sqs, ",
      weights.size(), " weights and ", steps.size(), " steps");
  const auto products = products_of_torch();
  std::vector<Run> runs;
  runs.reserve(count);
  int64_t tasks = 0, elements = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto run = checked_run(gradients[i], masters[i], exp_avgs[i], exp_avg_sqs[i], weights[i]);
    const auto numbers = kernels::AdamWNumbers::of(
        lr, beta1, beta2, eps, weight_decay, gradient_factor, checked_step(steps[i]), products);
    runs.push_back({run, numbers, tasks});
    tasks += (run.numel + kTask - 1) / kTask;
    elements += run.numel;
  }
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    update(runs, elements >= kPastCaches, begin, end);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(axonn, CPU, m) { m.impl(kOp, &adamw); }

}  // namespace axonn::ops::cpu
