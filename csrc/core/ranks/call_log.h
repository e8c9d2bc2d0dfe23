// Numbers the calls that a rank issues to its peers along one axis. The log tells which rank is
// behind if one waits too long and, if calls are compared, which rank issued a different one.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/ranks/key_value_store.h"

namespace axonn::comm {

// A rank's progress, which its peers read from the store.
struct CallProgress {
  int64_t issued = 0;     // number of calls; their sequence numbers are 1, 2, ...
  int64_t completed = 0;  // number of those that are done
  std::string last;       // signature of the last one issued

  std::string encode() const;
  static CallProgress decode(const std::string& text);
  friend bool operator==(const CallProgress&, const CallProgress&) = default;
};

// --- Message texts, as pure functions -----------------------------------------------------------

// "rank 2", "ranks 0, 1, 5"
std::string name_ranks(const std::vector<int64_t>& ranks);

// Says which ranks issued which call. signatures[i] is that of ranks[i]; the signature that the
// fewest ranks issued comes last. Returns nullopt if all are equal.
std::optional<std::string> describe_divergence(const std::string& axis, int64_t sequence,
                                               const std::vector<int64_t>& ranks,
                                               const std::vector<std::string>& signatures);

// Says that a call took too long, and which ranks are behind: those that have not issued it or, if
// all have, those that have not completed it. progress[i] is that of ranks[i], or nullopt if it is
// not known.
std::string describe_timeout(const std::string& axis, int64_t sequence,
                             const std::string& signature, double seconds,
                             const std::vector<int64_t>& ranks,
                             const std::vector<std::optional<CallProgress>>& progress);

// --- The log ------------------------------------------------------------------------------------

struct CallLogOptions {
  std::string axis;            // for messages
  std::string prefix;          // of the keys; equal on all ranks, and used by no other log
  int64_t rank;                // this rank, as an index into `ranks`
  std::vector<int64_t> ranks;  // the rank numbers that messages use
  bool compare = false;        // whether agree() compares calls
  std::chrono::duration<double> timeout = std::chrono::minutes(10);
};

// One thread issues calls; any thread may ask about them. `store` must outlive the log.
class CallLog {
 public:
  CallLog(CallLogOptions options, KeyValueStore& store);

  // Numbers a call that is about to be issued. `signature` must be equal on all ranks.
  int64_t announce(const std::string& signature);

  // If calls are compared, returns once every peer has announced the call that this rank announced
  // last; throws CommunicationError if a peer announced a different call, or none within the
  // timeout. If calls are not compared, returns at once. `check` is called during the wait, and may
  // throw if there is no point in waiting any longer.
  void agree(const std::function<void()>& check = [] {});

  // Marks all calls up to this number as done.
  void complete(int64_t sequence);

  // Publishes this rank's progress to the peers, if it has changed.
  void publish();

  // Returns the text of describe_timeout for a call of this rank. Reads the peers' progress.
  std::string explain_timeout(int64_t sequence, const std::string& signature, double seconds);

  CallProgress progress() const;
  const CallLogOptions& options() const { return options_; }

 private:
  std::string key(const char* what, int64_t rank) const;
  std::optional<CallProgress> read_progress(int64_t rank);
  std::string await_peer(int64_t rank, int64_t sequence, std::chrono::steady_clock::time_point end,
                         const std::function<void()>& check);

  const CallLogOptions options_;
  KeyValueStore& store_;
  mutable std::mutex mutex_;  // guards the two members below
  CallProgress progress_;
  std::optional<CallProgress> published_;
};

}  // namespace axonn::comm
