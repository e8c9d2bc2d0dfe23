// Presents an op's algorithms to the tuner, as the candidates of "auto".
#include <algorithm>
#include <optional>
#include <string>

#include "core/symmetric/shared_segment.h"
#include "ops/tuning/tuner.h"

namespace axonn::ops {
namespace {

// An op's call, as the tuner sees it: each algorithm is one way to make it.
class AlgorithmAlternatives final : public Alternatives {
 public:
  AlgorithmAlternatives(const Group& group, const CallTraits& call,
                        c10::function_ref<void(Algorithm)> run)
      : group_(group), call_(call), run_(run) {}

  Candidates candidates() const override {
    const auto traits = fused_traits();
    const bool locked = !traits.is_cpu && traits.is_supported && traits.verified_ranks == 0;
    if (locked) suggest_verify();
    return algorithm_candidates(traits);
  }

  bool knows(const std::string& name) const override {
    // A rank on a GPU may lack "fused" although rank 0 has it; condition() tells rank 0.
    const auto names = algorithm_candidates({.is_cpu = call_.device.is_cpu(),
                                             .shares_memory = call_.can_fuse,
                                             .is_supported = true,
                                             .num_ranks = 1,
                                             .verified_ranks = 1})
                           .names;
    return std::find(names.begin(), names.end(), name) != names.end();
  }

  // The kernels of "fused" write into the memory of peers, so all ranks must be on one host.
  std::optional<std::string> condition(const std::string& name) const override {
    if (call_.device.is_cpu() || name != name_of(Algorithm::kFused)) return std::nullopt;
    const auto names = algorithm_candidates(fused_traits()).names;
    const bool can = std::find(names.begin(), names.end(), name) != names.end();
    return can ? comm::host_identity() : "";
  }

  void run(const std::string& name) const override { run_(algorithm_named(name)); }

 private:
  FusedTraits fused_traits() const {
    const bool is_cpu = call_.device.is_cpu();
    return {.is_cpu = is_cpu,
            .shares_memory = call_.can_fuse,
            .is_supported = !is_cpu && call_.why_no_fused && call_.why_no_fused().empty(),
            .num_ranks = call_.largest_group > 0 ? call_.largest_group : group_.size,
            .verified_ranks = verified_kernels().fused_ranks};
  }

  const Group& group_;
  const CallTraits& call_;
  c10::function_ref<void(Algorithm)> run_;
};

}  // namespace

Algorithm algorithm_named(const std::string& name) {
  for (const auto algorithm : kAlgorithms) {
    if (name == name_of(algorithm)) return algorithm;
  }
  TORCH_INTERNAL_ASSERT(false, name);
}

Candidates algorithm_candidates(const FusedTraits& traits) {
  const bool fused = traits.is_cpu
                         ? traits.shares_memory
                         : traits.is_supported && traits.verified_ranks >= traits.num_ranks;
  Candidates all{{}, 0, ""};
  for (const auto algorithm : kAlgorithms) {
    if (algorithm != Algorithm::kFused || fused) all.names.emplace_back(name_of(algorithm));
  }
  // The default is the first way, "fused", on a CPU that has it; otherwise the last, "sequential".
  if (!traits.is_cpu || !fused) all.preferred = all.names.size() - 1;
  // On a GPU, measurements made before "fused" was a candidate do not count once it is one.
  if (!traits.is_cpu && fused) all.libraries = "fused=verified";
  return all;
}

Algorithm resolve_auto(const Group& group, const Signature& signature, const CallTraits& call,
                       c10::function_ref<void(Algorithm)> run) {
  const AlgorithmAlternatives alternatives(group, call, run);
  return algorithm_named(resolve(
      {group, signature, call.device, call.synchronizes, /*is_local=*/false, alternatives}));
}

}  // namespace axonn::ops
