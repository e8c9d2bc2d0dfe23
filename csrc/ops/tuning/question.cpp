#include "ops/tuning/question.h"

#include <ATen/Parallel.h>

#include <exception>
#include <utility>
#include <vector>

#include "core/ranks/errors.h"
#include "core/tuning/tuning_answer.h"
#include "core/tuning/tuning_plan.h"
#include "ops/tuning/measure.h"
#include "ops/tuning/stopwatch.h"

namespace axonn::ops {
namespace {

// The signature with what this rank adds to it. A call that this rank measured is kept on disk
// under it.
std::string full_signature(const Tunable& call, const std::string& libraries) {
  auto text = call.signature.text() + " layouts=" + call.signature.layouts();
  if (!call.is_local) {
    text += " ranks=" + std::to_string(call.group.size) +
            " memory=" + (call.group.can_fuse() ? "shared" : "separate");
  }
  text += " threads=" + std::to_string(at::get_num_threads());
  return libraries.empty() ? text : text + " " + libraries;
}

using tuning::Answer;

// Throws CommunicationError if rank 0 is in another call, or if this rank does not know the
// algorithm that rank 0 chose. Products that this rank does not have fail their check; an
// algorithm of an op that it does not have (fused) is rank 0's choice if it is a candidate.
void check_answer(const Tunable& call, const Answer& answer) {
  if (answer.asked != call.signature.text()) {
    const auto& own = call.signature.text();
    throw comm::CommunicationError(comm::waited_for(own, call.group.rank, 0, call.group.label()) +
                                   comm::called_instead(answer.asked, own));
  }
  if (!call.alternatives.knows(answer.algorithm)) {
    throw comm::CommunicationError(op_of(call) + ": rank " + std::to_string(call.group.rank) +
                                   " of group " + call.group.label() + " cannot use '" +
                                   answer.algorithm + "', which rank 0 chose");
  }
}

Choice choice_of(const Tunable& call, const Answer& answer) {
  const bool kept = answer.verdict == Answer::Verdict::kDisk;
  return {.group = call.group.name,
          .signature = answer.kept_under,
          .algorithm = answer.algorithm,
          .source = kept ? Choice::Source::kDisk : Choice::Source::kDefault,
          .median_us = answer.median_us};
}

// Removes from rank 0's answer every algorithm that ranks can only use together and cannot use
// here. All ranks remove the same ones, since each hears the others.
void drop_what_ranks_cannot_share(const Tunable& call, Mailbox* mailbox, Answer& answer) {
  const bool kept = answer.verdict == Answer::Verdict::kDisk;
  auto names = kept ? std::vector{answer.algorithm} : answer.candidates;
  const auto is_refused = [&](const std::string& name) {
    const auto word = call.alternatives.condition(name);
    if (!word) return false;
    return mailbox == nullptr ? word->empty() : !all_say_the_same(call.group, *mailbox, *word);
  };
  const auto num_refused = std::erase_if(names, is_refused);
  if (!kept) answer.candidates = std::move(names);
  if (!kept || num_refused == 0) return;
  const auto candidates = call.alternatives.candidates();
  answer.verdict = Answer::Verdict::kDefault;
  answer.algorithm = candidates.names[candidates.preferred];
  answer.median_us.clear();
}

// Measures the candidates and returns the fastest of those that are correct on all ranks.
Choice choice_measured(const Tunable& call, Mailbox* mailbox, const Answer& answer) {
  auto choice = choice_of(call, answer);
  const auto& names = answer.candidates;
  const auto outcome = measure(
      call.group, mailbox, call.device, [&] { return call.alternatives.check(names); },
      [&](size_t i) { call.alternatives.run(names[i]); });
  size_t preferred = 0;
  for (size_t i = 0; i < outcome.right.size(); ++i) {
    const auto& name = names[outcome.right[i]];
    if (name == answer.algorithm) preferred = i;
    choice.median_us.emplace_back(name, outcome.median_us[i]);
  }
  choice.algorithm = choice.median_us.at(tuning::choose(outcome.median_us, preferred)).first;
  choice.source = Choice::Source::kMeasured;
  return choice;
}

// Makes and posts the answer. Only rank 0 calls it.
Answer decide(const Tunable& call, Mailbox* mailbox, const Asking& asking, std::string& problem) {
  const auto candidates = call.alternatives.candidates();
  Answer answer{.asked = call.signature.text(),
                .kept_under = full_signature(call, candidates.libraries),
                .verdict = Answer::Verdict::kDefault,
                .algorithm = candidates.names[candidates.preferred],
                .candidates = {},
                .median_us = {}};
  auto found = asking.cache->find(answer.kept_under);
  problem = std::move(found.problem);
  if (found.record && call.alternatives.knows(found.record->algorithm)) {
    answer.verdict = Answer::Verdict::kDisk;
    answer.algorithm = found.record->algorithm;
    answer.median_us = std::move(found.record->median_us);
  } else if (asking.is_warm_up && !is_capturing(call.device)) {
    answer.verdict = Answer::Verdict::kMeasure;
    answer.candidates = candidates.names;
  }
  if (mailbox != nullptr) mailbox->post("answer", encode(answer));
  return answer;
}

// Returns rank 0's answer. If it does not come, the ranks are not in the same call. Then rank 0,
// which may wait for this rank in a measurement or in the op itself, fails at once, too.
Answer hear(const Tunable& call, Mailbox& mailbox, std::atomic<int64_t>& num_questions) {
  try {
    mailbox.wait("answer", 0);
    ++num_questions;
    auto answer = tuning::decode_answer(mailbox.read("answer", 0));
    check_answer(call, answer);
    return answer;
  } catch (const comm::CommunicationError& error) {
    fail_measurement(call.group, mailbox, error.what());
    if (call.group.shared) call.group.shared->abandon();
    throw;
  }
}

}  // namespace

std::string op_of(const Tunable& call) {
  const auto& text = call.signature.text();
  return text.substr(0, text.find(' '));
}

// Layouts are part of the key only for a group of one rank. Among several ranks, a peer with other
// layouts would ask at another call than this rank.
std::string key_of(const Tunable& call) {
  auto key = call.signature.key();
  if (call.group.size == 1) key.append(" ").append(call.signature.layouts());
  return key;
}

std::string full_signature(const Tunable& call) {
  return full_signature(call, call.alternatives.candidates().libraries);
}

Choice ask(const Tunable& call, Mailbox* mailbox, const Asking& asking) {
  std::string problem;
  Answer answer{};
  if (call.group.rank == 0) {
    ++asking.num_questions;
    try {
      answer = decide(call, mailbox, asking, problem);
    } catch (const std::exception& error) {
      if (mailbox != nullptr) mailbox->fail({"answer"}, error.what());
      throw;
    }
  } else {
    answer = hear(call, *mailbox, asking.num_questions);
  }
  try {
    drop_what_ranks_cannot_share(call, mailbox, answer);
  } catch (const std::exception& error) {
    if (mailbox != nullptr) fail_measurement(call.group, *mailbox, error.what());
    throw;
  }
  const bool measured = answer.verdict == Answer::Verdict::kMeasure;
  auto choice = measured ? choice_measured(call, mailbox, answer) : choice_of(call, answer);
  if (measured && call.group.rank == 0) {
    const auto kept = asking.cache->keep({choice.signature, choice.algorithm, choice.median_us});
    if (!kept.empty()) problem = kept;
  }
  if (!problem.empty()) {
    TORCH_WARN_ONCE("axonn_ext goes on without its cache of measurements (AXONN_CACHE_DIR): ",
                    problem);
  }
  return choice;
}

}  // namespace axonn::ops
