// What `algorithm="auto"` stands for: the algorithm that was measured for the signature of a call,
// in a warm-up of this process or of an earlier one. All ranks of a group get the same answer: rank
// 0's, whatever the others' clocks, disks and warm-ups say.
//
// A question about a signature is asked once per process group, by all ranks in the same call, and
// is numbered. Rank 0 answers: from disk, else "measure" in a warm-up, else the default. A known
// signature costs a look into a table and no communication.
//
// A default that was not measured is asked about again in a later warm-up. Ranks may not all be in
// it, and a rank that is not says nothing. So a rank in a warm-up posts its wish, once, before
// it runs call c of the signature. All ranks have to take part in call c for it to end, so all
// that wished by then know of each other in call c + 1, and see the same: where every rank wished
// in an earlier call, the question is asked again. Calls must have ended on the host for this. A
// rank that has wished looks into the store once a call, until all have.
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
  size_t preferred;       // without a measurement, and unless another is faster by more than noise
  std::string libraries;  // versions that times depend on, beside torch's and ours; may be empty
};

// A call that can be made in several ways, on its real arguments.
class Ways {
 public:
  // By this rank's arguments; asked for only while the call is not settled.
  virtual Candidates candidates() const = 0;
  // Whether this rank can tell what a name stands for that another rank, or the disk, says.
  virtual bool knows(const std::string& name) const = 0;
  // Before they are measured: 0 for those that this rank can use and that compute the right thing,
  // else 1. The preferred one is always right.
  virtual tuning::Numbers check(const std::vector<std::string>& names) const {
    return tuning::Numbers(names.size(), 0);
  }
  // For a candidate that ranks can use together only: what they must have in common for that, or
  // an empty text if this rank cannot. Nothing for others. Whether there is something to say is the
  // same on all ranks.
  virtual std::optional<std::string> condition(const std::string& name) const {
    (void)name;
    return std::nullopt;
  }
  // Makes the call and drops the result.
  virtual void run(const std::string& name) const = 0;

 protected:
  ~Ways() = default;
};

struct Tunable {
  const Group& group;  // whose ranks agree; of one rank: it decides by itself
  const Signature& signature;
  c10::Device device;  // of the tensors; nothing is measured while its stream is captured
  // Whether the call ends on a rank only after every rank of the group has come to it. Where it
  // does not, no rank can know that all wish to ask again, and a default stays.
  bool meets;
  // Whether peers play no part in the call: what is on disk then holds for any group.
  bool is_local;
  const Ways& ways;
};

// The name of the candidate to use in this call. Where it has to be measured, rank 0's candidates
// are; those that are wrong on any rank are out, each other is run some dozen times, equally often
// on all ranks. Throws what `run` throws, and CommunicationError if a
// peer does not do its part.
std::string resolve(const Tunable& call);

// With what a rank adds to it: the name under which a call of its own is kept on disk.
std::string full_signature(const Tunable& call);

// What is known of kernels for GPUs that are not measured before they were run and found right:
// what `axonn-ext verify` has left on this machine.
struct VerifiedKernels {
  int64_t fused_ranks = 0;  // "fused" is right between so many ranks; 0: not known to be
  bool suggest = false;     // nothing is known, and the user is told once where it matters
};

struct TuningSettings {
  double timeout_seconds;
  std::string cache_directory;  // empty: nothing is read from or written to disk
  tuning::Platform platform;
  VerifiedKernels verified;
};

// Values that axonn_ext/settings.py read.
void configure_tuning(const TuningSettings& settings);

// The cache on disk, for choices that are not of an op's algorithm (tile configs of Triton
// kernels).
tuning::TuningCache::Answer find_measurement(const std::string& signature);
std::string keep_measurement(const tuning::Record& record);

VerifiedKernels verified_kernels();

// Says once that `axonn-ext verify` would let more be measured here; nothing where it has been run.
void suggest_verify();

// Between these, calls of signatures that are not known are measured. They nest.
void enter_warm_up();
void leave_warm_up();

// One that is known to exist.
Algorithm algorithm_named(const std::string& name);

// What an op tells of a call; the same on all ranks, but for why_no_fused.
struct CallTraits {
  c10::Device device;
  bool can_fuse;      // its ranks are of CPUs and share memory
  bool is_empty;      // there is nothing to measure
  bool meets = true;  // see Tunable
  // On GPUs: why "fused" cannot make the call on this rank; empty: it can.
  c10::function_ref<std::string()> why_no_fused;
  int64_t largest_group = 0;  // of those that it calls, if not the one that agrees; 0: that one
};

// The algorithms that "auto" may choose between. On GPUs nothing is a default that was not
// measured, and "fused" is measured only where it can make the call and is known to be right.
struct FusedTraits {
  bool is_cpu;
  bool shares_memory;      // CPU
  bool is_supported;       // GPU
  int64_t num_ranks;       // GPU
  int64_t verified_ranks;  // GPU
};
Candidates algorithm_candidates(const FusedTraits& traits);

// The algorithm to use in this call of an op; see resolve(). Not for calls that need no peer (empty
// tensors).
Algorithm resolve_auto(const Group& group, const Signature& signature, const CallTraits& call,
                       c10::function_ref<void(Algorithm)> run);

// Runs an op, `run(algorithm)`, with the algorithm asked for or, for "auto", the one chosen.
template <typename Run>
auto run_algorithm(const Group& group, AskedAlgorithm asked, CallTraits call,
                   const Signature& signature, Run&& run) {
  if (asked != kAuto) return run(*asked);
  if (call.is_empty) return run(call.can_fuse ? Algorithm::kFused : Algorithm::kSequential);
  // A GPU's calls end on the host before a peer has come to them.
  call.meets = call.meets && call.device.is_cpu();
  return run(resolve_auto(group, signature, call, [&](Algorithm a) { run(a); }));
}

struct Choice {
  enum class Source { kDefault, kDisk, kMeasured };

  std::string group;      // empty: of a rank that decides by itself
  std::string signature;  // with rank 0's layouts and threads and, for ops, the group's kind
  std::string algorithm;
  Source source;
  std::vector<std::pair<std::string, double>> median_us;  // by algorithm; empty: never measured
};

const char* name_of(Choice::Source source);

// What "auto" stands for in this process, for the groups that live.
std::vector<Choice> tuning_choices();

// Forgets them, so that they are asked for anew; not what is on disk. To be called on all ranks,
// between the same calls.
void clear_tuning_choices();

}  // namespace axonn::ops
