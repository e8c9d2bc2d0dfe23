// Chooses what `algorithm="auto"` stands for: the algorithm that was measured to be fastest for a
// call's signature, in a warm-up of this process or of an earlier one. All ranks of a group get
// rank 0's answer, whatever the others' clocks, disks and warm-ups say.
//
// A question about a signature is asked once per process group, by all ranks in the same call, and
// is numbered. Rank 0 answers with an algorithm from disk; else with "measure" in a warm-up; else
// with the default. A known signature costs a table lookup and no communication.
//
// If the answer is a default that was not measured, the question is asked again in a later warm-up,
// once all ranks are in one. A rank outside of a warm-up posts nothing. So each rank in a warm-up
// posts, once, before it runs call c of the signature, that it wants to ask again. Call c ends only
// after all ranks have come to it. In call c + 1 every rank therefore sees the same posts from call
// c and before; if each rank has posted by then, the question is asked again. This requires that
// calls have ended on the host. A rank that has posted looks into the store once per call, until
// all have.
#pragma once

#include <c10/util/FunctionRef.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/tuning/tuning_cache.h"
#include "core/tuning/tuning_plan.h"
#include "ops/algorithm.h"
#include "ops/group/group.h"
#include "ops/tuning/signature.h"

namespace axonn::ops {

// The ways in which a call can be made.
struct Candidates {
  std::vector<std::string> names;
  size_t preferred;       // used without a measurement, or if no other is faster by more than noise
  std::string libraries;  // versions, other than torch's and ours, that times depend on; or empty
};

// A call that can be made in several ways, on its real arguments.
class Alternatives {
 public:
  // The candidates for this rank's arguments; called until the call is settled, or to name it.
  virtual Candidates candidates() const = 0;
  // Returns whether this rank knows a name that another rank, or the disk, has given.
  virtual bool knows(const std::string& name) const = 0;
  // Called before the candidates are measured. Returns 0 for those that this rank can use and that
  // compute the right values, else 1. The preferred candidate is always right.
  virtual tuning::Numbers check(const std::vector<std::string>& names) const {
    return tuning::Numbers(names.size(), 0);
  }
  // For a candidate that ranks can use only together, returns what they must have in common for
  // that, or an empty string if this rank cannot use it. Returns nothing for other candidates. All
  // ranks must return nothing for the same candidates.
  virtual std::optional<std::string> condition(const std::string& name) const {
    (void)name;
    return std::nullopt;
  }
  // Makes the call and drops the result.
  virtual void run(const std::string& name) const = 0;

 protected:
  ~Alternatives() = default;
};

struct Tunable {
  const Group& group;  // whose ranks agree; a single rank decides by itself
  const Signature& signature;
  c10::Device device;  // of the tensors; nothing is measured while its stream is being captured
  // Whether the call ends on a rank only after every rank of the group has come to it. If it does
  // not, no rank can know that all want to ask again, and a default stays.
  bool synchronizes;
  // Whether the call needs no peer. A choice on disk then holds for any group.
  bool is_local;
  const Alternatives& alternatives;
};

// Returns the name of the candidate to use in this call. If it has to be measured, rank 0's
// candidates are measured: those that are wrong on any rank are left out, and each of the others is
// timed in 3 to 7 batches of calls, equally often on all ranks. Throws what `run` throws, and
// CommunicationError if a peer does not do its part.
std::string resolve(const Tunable& call);

// The signature plus what this rank adds: layouts, threads, versions and, unless the call is local,
// the group's size and memory. A call that this rank measured is kept on disk under it.
std::string full_signature(const Tunable& call);

// The findings of `axonn-ext verify` on this machine about kernels for GPUs, which are measured
// only after they have run and passed its checks.
struct VerifiedKernels {
  int64_t fused_ranks = 0;  // largest group size for which "fused" is known to be correct; 0: none
  bool suggest = false;     // nothing is known, and the user is told once, where it matters
};

struct TuningSettings {
  double timeout_seconds;
  std::string cache_directory;  // empty: nothing is read from or written to disk
  tuning::Platform platform;
  VerifiedKernels verified;
};

// Takes the values of axonn_ext/spec/settings.py.
void configure_tuning(const TuningSettings& settings);

VerifiedKernels verified_kernels();

// Tells the user once that `axonn-ext verify` would let more be measured here. Does nothing where
// it has been run.
void suggest_verify();

// Calls of unknown signatures are measured between these two. The pairs may be nested.
void enter_warm_up();
void leave_warm_up();

// Returns the algorithm of this name, which must exist.
Algorithm algorithm_named(const std::string& name);

// The properties of an op's call. They are the same on all ranks, except for why_no_fused.
struct CallTraits {
  c10::Device device;
  bool can_fuse;             // whether its ranks are on CPUs and share memory
  bool is_empty;             // whether there is nothing to measure
  bool synchronizes = true;  // see Tunable
  // Returns why "fused" cannot make the call on this rank, or an empty string if it can; on GPUs
  // only.
  c10::function_ref<std::string()> why_no_fused;
  int64_t largest_group = 0;  // the size of the largest group that it uses; 0: of the agreeing one
};

// The algorithms that "auto" may choose between. On GPUs the default is "sequential", and "fused"
// is measured only where it can make the call and is known to be correct.
struct FusedTraits {
  bool is_cpu;
  bool shares_memory;      // CPU
  bool is_supported;       // GPU
  int64_t num_ranks;       // GPU
  int64_t verified_ranks;  // GPU
};
Candidates algorithm_candidates(const FusedTraits& traits);

// Returns the algorithm to use in this call of an op; see resolve(). Must not be called for calls
// that need no peer (empty tensors).
Algorithm resolve_auto(const Group& group, const Signature& signature, const CallTraits& call,
                       c10::function_ref<void(Algorithm)> run);

// Runs an op, `run(algorithm)`, with the algorithm that was asked for or, for "auto", with the one
// chosen.
template <typename Run>
auto run_algorithm(const Group& group, AskedAlgorithm asked, CallTraits call,
                   const Signature& signature, Run&& run) {
  if (asked != kAuto) return run(*asked);
  if (call.is_empty) return run(call.can_fuse ? Algorithm::kFused : Algorithm::kSequential);
  // On a GPU, calls end on the host before a peer has come to them.
  call.synchronizes = call.synchronizes && call.device.is_cpu();
  return run(resolve_auto(group, signature, call, [&](Algorithm a) { run(a); }));
}

struct Choice {
  enum class Source { kDefault, kDisk, kMeasured };

  std::string group;      // empty: a rank decided by itself
  std::string signature;  // full_signature() of rank 0
  std::string algorithm;
  Source source;
  std::vector<std::pair<std::string, double>> median_us;  // by algorithm; empty: never measured
};

const char* name_of(Choice::Source source);

// The choices of "auto" in this process, for the groups that still exist.
std::vector<Choice> tuning_choices();

// Forgets these choices, so that they are settled anew; the disk is not changed. All ranks must
// call it, between the same calls.
void clear_tuning_choices();

}  // namespace axonn::ops
