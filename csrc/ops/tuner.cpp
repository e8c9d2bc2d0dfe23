#include "ops/tuner.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <unordered_map>

#include "core/errors.h"
#include "core/tuning_plan.h"
#include "ops/mailbox.h"
#include "ops/measure.h"
#include "ops/stopwatch.h"

namespace axonn::ops {
namespace {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using Run = c10::function_ref<void(Algorithm)>;

// What is settled for one process group. The mutex is not held while ranks talk.
struct GroupChoices {
  struct Entry {
    Choice choice;
    int64_t question;        // the one that settled it
    int64_t calls = 0;       // since then, if it is a default
    bool announced = false;  // this rank has wished to ask again
  };

  std::string prefix;  // of its keys in the store
  std::mutex mutex;
  std::unordered_map<std::string, Entry> entries;  // by the key of the signature
  // Those that rank 0 answered: a rank that asked alone, and failed, is not out of step.
  std::atomic<int64_t> num_questions = 0;
};

// One call of an op with algorithm="auto".
struct Request {
  const Group& group;
  const Signature& signature;
  c10::Device device;
  bool meets;
  std::span<const Algorithm> legal;
  Run run;

  bool is_legal(Algorithm algorithm) const {
    return std::find(legal.begin(), legal.end(), algorithm) != legal.end();
  }
  size_t preferred() const {
    const auto fused = std::find(legal.begin(), legal.end(), Algorithm::kFused);
    if (fused != legal.end()) return static_cast<size_t>(fused - legal.begin());
    const auto sequential = std::find(legal.begin(), legal.end(), Algorithm::kSequential);
    return sequential != legal.end() ? static_cast<size_t>(sequential - legal.begin()) : 0;
  }
  const std::string& text() const { return signature.text(); }
  std::string op() const { return text().substr(0, text().find(' ')); }
  // With what rank 0 adds to it. Ranks may have unequal layouts and numbers of threads.
  std::string full_signature() const {
    return text() + " layouts=" + signature.layouts() + " ranks=" + std::to_string(group.size) +
           " memory=" + (group.can_fuse() ? "shared" : "separate") +
           " threads=" + std::to_string(at::get_num_threads());
  }
};

std::optional<Algorithm> algorithm_of(const std::string& name) {
  for (const auto algorithm : kAlgorithms) {
    if (name == name_of(algorithm)) return algorithm;
  }
  return std::nullopt;
}

// --- Rank 0's answer, as the others read it ------------------------------------------------------

struct Answer {
  bool measure;  // else `choice` is complete
  Choice choice;
};

constexpr const char* kMeasure = "measure";

std::string encode(const std::string& signature, const Answer& answer) {
  const auto& choice = answer.choice;
  std::ostringstream out;
  out << signature << '\n'
      << choice.signature << '\n'
      << (answer.measure ? kMeasure : name_of(choice.source)) << '\n'
      << name_of(choice.algorithm);
  for (const auto& [algorithm, median] : choice.median_us) out << ' ' << algorithm << ' ' << median;
  return out.str();
}

// Throws CommunicationError if rank 0 is in another call, or does not know these algorithms.
Answer decode(const Request& request, const std::string& text) {
  std::istringstream in(text);
  std::string signature, verdict, algorithm, name;
  Answer answer{};
  std::getline(in, signature);
  std::getline(in, answer.choice.signature);
  in >> verdict >> algorithm;
  const auto where = request.op() + ": rank " + std::to_string(request.group.rank) + " of group " +
                     request.group.name;
  if (signature != request.text()) {
    throw comm::CommunicationError(where + " calls " + request.text() + " but rank 0 calls " +
                                   signature +
                                   ": algorithm='auto' needs equal shapes and dtypes on all ranks");
  }
  const auto chosen = algorithm_of(algorithm);
  if (!chosen || !request.is_legal(*chosen)) {
    throw comm::CommunicationError(where + " cannot use '" + algorithm + "', which rank 0 chose");
  }
  answer.choice.group = request.group.name;
  answer.choice.algorithm = *chosen;
  answer.measure = verdict == kMeasure;
  for (const auto source : {Choice::Source::kDisk, Choice::Source::kMeasured}) {
    if (verdict == name_of(source)) answer.choice.source = source;
  }
  for (double median = 0; in >> name >> median;) {
    answer.choice.median_us.emplace_back(name, median);
  }
  return answer;
}

// --- The table and the questions -----------------------------------------------------------------

class Tuner {
 public:
  void configure(const TuningSettings& settings) {
    const std::lock_guard lock(mutex_);
    timeout_seconds_ = settings.timeout_seconds;
    cache_ = std::make_shared<tuning::TuningCache>(settings.cache_directory, settings.platform);
  }

  void change_warm_up(int64_t by) { warm_up_depth_ += by; }

  Algorithm resolve(const Request& request) {
    const auto process_group = c10d::resolve_process_group(request.group.name);
    const auto choices = choices_of(request.group, process_group);
    std::optional<GroupChoices::Entry> known;
    {
      const std::lock_guard lock(choices->mutex);
      if (const auto it = choices->entries.find(request.signature.key());
          it != choices->entries.end()) {
        auto& entry = it->second;
        const bool settled = entry.choice.source != Choice::Source::kDefault;
        if (settled || !request.meets) return entry.choice.algorithm;
        ++entry.calls;
        if (!entry.announced && warm_up_depth_ == 0) return entry.choice.algorithm;
        known = entry;
        entry.announced = true;
      }
    }
    const auto mailbox = [&](int64_t question) {
      return Mailbox(request.group, process_group->getStore(),
                     choices->prefix + std::to_string(question) + "/", request.op(),
                     timeout_seconds_);
    };
    if (known && !all_ask_again(request, *known, mailbox(known->question))) {
      return known->choice.algorithm;
    }
    const int64_t question = choices->num_questions;
    auto choice = ask(request, mailbox(question), choices->num_questions);
    const std::lock_guard lock(choices->mutex);
    choices->entries.insert_or_assign(request.signature.key(),
                                      GroupChoices::Entry{choice, question});
    return choice.algorithm;
  }

  std::vector<Choice> choices() {
    std::vector<Choice> all;
    for (const auto& group : living()) {
      const std::lock_guard lock(group->mutex);
      for (const auto& [signature, entry] : group->entries) all.push_back(entry.choice);
    }
    std::sort(all.begin(), all.end(), [](const Choice& a, const Choice& b) {
      return std::tie(a.group, a.signature) < std::tie(b.group, b.signature);
    });
    return all;
  }

  void clear() {
    for (const auto& group : living()) {
      const std::lock_guard lock(group->mutex);
      group->entries.clear();
    }
  }

 private:
  // An entry holds as long as its process group lives; a name that c10d gave to another group later
  // meets a new entry, and new keys, should the store be the old one.
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> owner;
    std::shared_ptr<GroupChoices> choices;
  };

  std::shared_ptr<GroupChoices> choices_of(const Group& group, const ProcessGroupPtr& owner) {
    const std::lock_guard lock(mutex_);
    if (const auto entry = groups_.find(group.name); entry != groups_.end()) {
      if (entry->second.owner.lock() == owner) return entry->second.choices;
    }
    std::erase_if(groups_, [](const auto& entry) { return entry.second.owner.expired(); });
    auto choices = std::make_shared<GroupChoices>();
    choices->prefix = "axonn/tuning/" + group.name + "/";
    const auto counter = choices->prefix + "count/" + std::to_string(group.rank);
    choices->prefix += std::to_string(owner->getStore()->add(counter, 1)) + "/";
    groups_.insert_or_assign(group.name,
                             Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(owner), choices});
    return choices;
  }

  std::vector<std::shared_ptr<GroupChoices>> living() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<GroupChoices>> groups;
    for (const auto& [name, entry] : groups_) {
      if (!entry.owner.expired()) groups.push_back(entry.choices);
    }
    return groups;
  }

  // Whether every rank had wished so before this call; the same on all ranks that wonder.
  static bool all_ask_again(const Request& request, const GroupChoices::Entry& known,
                            Mailbox mailbox) {
    const auto wish_of = [](int64_t rank) { return "again/" + std::to_string(rank); };
    if (!known.announced) {
      mailbox.post(wish_of(request.group.rank), std::to_string(known.calls));
      return false;
    }
    std::vector<std::string> wishes;
    for (int64_t rank = 0; rank < request.group.size; ++rank) wishes.push_back(wish_of(rank));
    if (!mailbox.posted(wishes)) return false;
    for (int64_t rank = 0; rank < request.group.size; ++rank) {
      if (std::stoll(mailbox.read(wishes[rank], rank)) >= known.calls) return false;
    }
    return true;
  }

  // Counts the question as soon as there is an answer, whatever becomes of it.
  Choice ask(const Request& request, Mailbox mailbox, std::atomic<int64_t>& num_questions) {
    std::string problem;
    Answer answer{};
    if (request.group.rank == 0) {
      answer = decide(request, mailbox, problem);
      ++num_questions;
    } else {
      answer = hear(request, mailbox, num_questions);
    }
    auto choice = answer.choice;
    if (answer.measure) {
      const auto medians =
          measure(request.group, mailbox, request.device, request.legal, request.run);
      choice.source = Choice::Source::kMeasured;
      choice.algorithm = request.legal[tuning::choose(medians, request.preferred())];
      for (size_t i = 0; i < medians.size(); ++i) {
        choice.median_us.emplace_back(name_of(request.legal[i]), medians[i]);
      }
    }
    if (answer.measure && request.group.rank == 0) {
      const auto kept =
          cache()->keep({choice.signature, name_of(choice.algorithm), choice.median_us});
      if (!kept.empty()) problem = kept;
    }
    if (!problem.empty()) {
      TORCH_WARN_ONCE("axonn_ext goes on without its cache of measurements (AXONN_CACHE_DIR): ",
                      problem);
    }
    return choice;
  }

  // Rank 0 only; posts the answer.
  Answer decide(const Request& request, Mailbox& mailbox, std::string& problem) {
    Answer answer{.measure = false,
                  .choice = {.group = request.group.name,
                             .signature = request.full_signature(),
                             .algorithm = request.legal[request.preferred()],
                             .source = Choice::Source::kDefault,
                             .median_us = {}}};
    auto found = cache()->find(answer.choice.signature);
    problem = std::move(found.problem);
    const auto kept = found.record ? algorithm_of(found.record->algorithm) : std::nullopt;
    if (kept && request.is_legal(*kept)) {
      answer.choice.algorithm = *kept;
      answer.choice.source = Choice::Source::kDisk;
      answer.choice.median_us = std::move(found.record->median_us);
    } else {
      answer.measure = warm_up_depth_ > 0 && !is_capturing(request.device);
    }
    mailbox.post("answer", encode(request.text(), answer));
    return answer;
  }

  // Rank 0's answer. Without one, the ranks are not in the same call: rank 0, which may wait for
  // this one in a measurement or in the op itself, fails at once, too.
  static Answer hear(const Request& request, Mailbox& mailbox,
                     std::atomic<int64_t>& num_questions) {
    try {
      const auto text = mailbox.read("answer", 0);
      ++num_questions;
      return decode(request, text);
    } catch (const comm::CommunicationError& error) {
      fail_measurement(request.group, mailbox, error.what());
      if (request.group.shared) request.group.shared->abandon();
      throw;
    }
  }

  std::shared_ptr<const tuning::TuningCache> cache() {
    const std::lock_guard lock(mutex_);
    return cache_;
  }

  std::mutex mutex_;
  std::atomic<int64_t> warm_up_depth_ = 0;
  std::atomic<double> timeout_seconds_ = 600.0;
  std::shared_ptr<const tuning::TuningCache> cache_ =
      std::make_shared<tuning::TuningCache>("", tuning::Platform{});
  std::map<std::string, Entry> groups_;
};

Tuner& tuner() {
  static Tuner instance;
  return instance;
}

}  // namespace

const char* name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kFused:
      return "fused";
    case Algorithm::kChunked:
      return "chunked";
    case Algorithm::kSequential:
      return "sequential";
  }
  return "";
}

const char* name_of(Choice::Source source) {
  switch (source) {
    case Choice::Source::kDefault:
      return "default";
    case Choice::Source::kDisk:
      return "disk";
    case Choice::Source::kMeasured:
      return "measured";
  }
  return "";
}

void configure_tuning(const TuningSettings& settings) { tuner().configure(settings); }

void enter_warm_up() { tuner().change_warm_up(+1); }

void leave_warm_up() { tuner().change_warm_up(-1); }

Algorithm algorithm_named(const std::string& name) {
  const auto algorithm = algorithm_of(name);
  TORCH_INTERNAL_ASSERT(algorithm, name);
  return *algorithm;
}

Algorithm resolve_auto(const Group& group, const Signature& signature, c10::Device device,
                       bool meets, std::span<const Algorithm> legal, Run run) {
  return tuner().resolve({group, signature, device, meets, legal, run});
}

std::vector<Choice> tuning_choices() { return tuner().choices(); }

void clear_tuning_choices() { tuner().clear(); }

}  // namespace axonn::ops
