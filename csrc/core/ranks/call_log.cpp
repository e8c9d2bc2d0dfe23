#include "core/ranks/call_log.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <thread>

#include "core/ranks/errors.h"

namespace axonn::comm {
namespace {

using Clock = std::chrono::steady_clock;

// Splits "17 all_gather ..." into 17 and the text after the space.
std::pair<int64_t, std::string> split_number(const std::string& text) {
  const auto space = text.find(' ');
  return {std::stoll(text.substr(0, space)),
          space == std::string::npos ? "" : text.substr(space + 1)};
}

std::string describe_last(const CallProgress& progress) {
  if (progress.issued == 0) return "which has issued none";
  return "whose last is call " + std::to_string(progress.issued) + ", " + progress.last;
}

}  // namespace

std::string CallProgress::encode() const {
  return std::to_string(issued) + " " + std::to_string(completed) + " " + last;
}

CallProgress CallProgress::decode(const std::string& text) {
  const auto [issued, rest] = split_number(text);
  const auto [completed, last] = split_number(rest);
  return {issued, completed, last};
}

std::string name_ranks(const std::vector<int64_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

std::optional<std::string> describe_divergence(const std::string& axis, int64_t sequence,
                                               const std::vector<int64_t>& ranks,
                                               const std::vector<std::string>& signatures) {
  std::map<std::string, std::vector<int64_t>> callers;
  for (size_t i = 0; i < ranks.size(); ++i) callers[signatures[i]].push_back(ranks[i]);
  if (callers.size() < 2) return std::nullopt;
  std::vector<std::pair<std::string, std::vector<int64_t>>> groups(callers.begin(), callers.end());
  std::stable_sort(groups.begin(), groups.end(),
                   [](const auto& a, const auto& b) { return a.second.size() > b.second.size(); });
  std::ostringstream text;
  text << "axis " << axis << ": the ranks diverge at call " << sequence << ":";
  for (size_t i = 0; i < groups.size(); ++i) {
    text << (i == 0 ? " " : "; ") << groups[i].first << " on " << name_ranks(groups[i].second);
  }
  text << ". All calls before it were equal";
  return text.str();
}

std::string describe_timeout(const std::string& axis, int64_t sequence,
                             const std::string& signature, double seconds,
                             const std::vector<int64_t>& ranks,
                             const std::vector<std::optional<CallProgress>>& progress) {
  std::ostringstream text;
  text << "axis " << axis << ": call " << sequence << ", " << signature << ", is not done after "
       << seconds << " s";
  std::vector<int64_t> unfinished, unknown;
  bool behind = false;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (!progress[i]) {
      unknown.push_back(ranks[i]);
    } else if (progress[i]->issued < sequence) {
      text << (behind ? "; " : "; behind: ") << "rank " << ranks[i] << ", "
           << describe_last(*progress[i]);
      behind = true;
    } else if (progress[i]->completed < sequence) {
      unfinished.push_back(ranks[i]);
    }
  }
  if (!behind && unknown.empty()) {
    text << "; all ranks have issued it, not done on " << name_ranks(unfinished);
  }
  if (!unknown.empty()) text << "; nothing was heard of " << name_ranks(unknown);
  return text.str();
}

CallLog::CallLog(CallLogOptions options, KeyValueStore& store)
    : options_(std::move(options)), store_(store) {}

int64_t CallLog::announce(const std::string& signature) {
  const std::lock_guard lock(mutex_);
  progress_.last = signature;
  return ++progress_.issued;
}

void CallLog::agree(const std::function<void()>& check) {
  if (!options_.compare) return;
  const CallProgress mine = progress();
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(options_.timeout);
  // Each rank writes its calls to two keys in turn. It overwrites call n only after every peer has
  // announced n + 1, which a peer does only after it has read n.
  const char* const slot = mine.issued % 2 == 0 ? "even" : "odd";
  store_.set(key(slot, options_.rank), std::to_string(mine.issued) + " " + mine.last);
  std::vector<std::string> signatures;
  for (int64_t rank = 0; rank < static_cast<int64_t>(options_.ranks.size()); ++rank) {
    signatures.push_back(rank == options_.rank ? mine.last
                                               : await_peer(rank, mine.issued, end, check));
  }
  if (const auto text =
          describe_divergence(options_.axis, mine.issued, options_.ranks, signatures)) {
    throw CommunicationError(*text);
  }
}

std::string CallLog::await_peer(int64_t rank, int64_t sequence, Clock::time_point end,
                                const std::function<void()>& check) {
  const std::string name = key(sequence % 2 == 0 ? "even" : "odd", rank);
  auto pause = std::chrono::microseconds(50);
  while (true) {
    if (store_.has(name)) {
      auto [number, signature] = split_number(store_.get(name));
      if (number >= sequence) return signature;
    }
    if (Clock::now() > end) {
      publish();
      const CallProgress mine = progress();
      throw CommunicationError(explain_timeout(sequence, mine.last, options_.timeout.count()));
    }
    check();
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(10000));
  }
}

void CallLog::complete(int64_t sequence) {
  const std::lock_guard lock(mutex_);
  progress_.completed = std::max(progress_.completed, sequence);
}

void CallLog::publish() {
  const CallProgress now = progress();
  {
    const std::lock_guard lock(mutex_);
    if (published_ == now) return;
    published_ = now;
  }
  store_.set(key("progress", options_.rank), now.encode());
}

std::string CallLog::explain_timeout(int64_t sequence, const std::string& signature,
                                     double seconds) {
  std::vector<std::optional<CallProgress>> all;
  for (int64_t rank = 0; rank < static_cast<int64_t>(options_.ranks.size()); ++rank) {
    all.push_back(rank == options_.rank ? progress() : read_progress(rank));
  }
  return describe_timeout(options_.axis, sequence, signature, seconds, options_.ranks, all);
}

std::optional<CallProgress> CallLog::read_progress(int64_t rank) {
  // This is called while an error is reported. If the store is gone, too, that must not hide the
  // original cause.
  try {
    const std::string name = key("progress", rank);
    if (!store_.has(name)) return CallProgress{};  // a rank publishes from its first call on
    return CallProgress::decode(store_.get(name));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

CallProgress CallLog::progress() const {
  const std::lock_guard lock(mutex_);
  return progress_;
}

std::string CallLog::key(const char* what, int64_t rank) const {
  return options_.prefix + "/" + what + "/" + std::to_string(rank);
}

}  // namespace axonn::comm
