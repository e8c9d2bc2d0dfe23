#include "ops/composed/matmul_op.h"

#include <ATen/ops/mm.h>

#include "ops/checks.h"
#include "ops/composed/group_arguments.h"
#include "ops/group/agreement.h"
#include "ops/tuning/tuner.h"

namespace axonn::ops {

at::Tensor run_agreed(const MatmulOp& op, const Group& group, const MatmulCall& in, Algorithm how) {
  switch (how) {
    case Algorithm::kFused:
      if (in.a.numel() > 0 && in.b.numel() > 0) return op.fused_on_cuda(group, in);
      return op.sequential(group, in);
    case Algorithm::kChunked:
      return op.chunked(group, in);
    case Algorithm::kSequential:
      return op.sequential(group, in);
  }
  TORCH_INTERNAL_ASSERT(false);
}

at::Tensor agree_and_run(const MatmulOp& op, Group& group, const MatmulCall& in,
                         AskedAlgorithm asked) {
  const auto device = in.a.device();
  Signature signature(op.name);
  op.sign(signature, in);
  const auto why_not = [&] {
    const auto product = op.product(in.a.sizes(), in.b.sizes(), in.dim, group.size);
    return why_no_fused(device, in.a.scalar_type(), product, group.size);
  };
  const CallTraits traits{.device = device,
                          .can_fuse = group.can_fuse(),
                          .is_empty = op.is_empty(in),
                          .why_no_fused = why_not};
  return run_algorithm(group, asked, traits, signature, [&](Algorithm how) {
    const auto call = signature.call(name_of(how));
    if (how == Algorithm::kFused && device.is_cpu()) return op.fused_on_cpu(group, call, in);
    return agreed(call, device, {&group}, [&] { return run_agreed(op, group, in, how); });
  });
}

at::Tensor check_and_run(const MatmulOp& op, const MatmulCall& in, const std::string& group_name,
                         int64_t group_size, const std::string& algorithm) {
  check_group_size(op.name, group_size);
  check_matmul(op.name, op.a_name, in.a, op.b_name, in.b);
  op.check(in, group_size);
  const auto device = in.a.device();
  const auto asked = parse_algorithm(op.name, algorithm, device, /*fused_on_cuda=*/true);
  if (group_size == 1) return at::mm(in.a, in.b);
  auto group = resolve_group(op.name, group_name, group_size, asked, device);
  return agree_and_run(op, group, in, asked);
}

}  // namespace axonn::ops
