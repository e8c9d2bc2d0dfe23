// What a rank has issued to its peers along one axis, numbered: tells which rank is behind when one
// waits too long, and, where calls are compared, which rank issued something else.
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

// How far a rank has come. Its peers read this in the store.
struct CallProgress {
  int64_t issued = 0;     // calls; their sequence numbers are 1, 2, ...
  int64_t completed = 0;  // of those
  std::string last;       // signature of the last one issued

  std::string encode() const;
  static CallProgress decode(const std::string& text);
  friend bool operator==(const CallProgress&, const CallProgress&) = default;
};

// --- What the messages say: functions of values alone -------------------------------------------

// "rank 2", "ranks 0, 1, 5"
std::string name_ranks(const std::vector<int64_t>& ranks);

// Which ranks issued what, if not all issued the same: those of the fewest last. signatures[i] is
// that of ranks[i]. Nothing if all are equal.
std::optional<std::string> describe_divergence(const std::string& axis, int64_t sequence,
                                               const std::vector<int64_t>& ranks,
                                               const std::vector<std::string>& signatures);

// That a call took too long, and which ranks are behind: those that have not issued it and, if
// there is none, those that have not completed it. progress[i] is that of ranks[i]; nothing:
// unknown.
std::string describe_timeout(const std::string& axis, int64_t sequence,
                             const std::string& signature, double seconds,
                             const std::vector<int64_t>& ranks,
                             const std::vector<std::optional<CallProgress>>& progress);

// --- The log ------------------------------------------------------------------------------------

struct CallLogOptions {
  std::string axis;            // for messages
  std::string prefix;          // of the keys: equal on all ranks, used by no other log
  int64_t rank;                // this one, as an index of `ranks`
  std::vector<int64_t> ranks;  // as messages name them
  bool compare = false;        // agree() compares calls
  std::chrono::duration<double> timeout = std::chrono::minutes(10);
};

// One thread issues; any thread may ask. `store` must outlive the log.
class CallLog {
 public:
  CallLog(CallLogOptions options, KeyValueStore& store);

  // Numbers a call that is about to be issued. `signature` must be equal on all ranks.
  int64_t announce(const std::string& signature);

  // If calls are compared: returns once every peer has announced the call announced last, and
  // throws CommunicationError if one announced another, or none within the timeout. Else returns at
  // once. `check` is called while it waits, and may throw what makes waiting vain.
  void agree(const std::function<void()>& check = [] {});

  // All calls up to this number are done.
  void complete(int64_t sequence);

  // Lets the peers see how far this rank has come, if that has changed.
  void publish();

  // The text of describe_timeout for a call of this rank. Reads the peers' progress.
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
  mutable std::mutex mutex_;  // of the two below
  CallProgress progress_;
  std::optional<CallProgress> published_;
};

}  // namespace axonn::comm
