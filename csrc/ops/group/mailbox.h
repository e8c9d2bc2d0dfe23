// Short texts that the ranks of a group leave for each other in its c10d store, to agree on
// something outside of any collective. An exchange takes milliseconds, not microseconds, so it does
// not belong in a training step. A name has the form "what/...", and messages use its first part to
// say what was waited for.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "ops/group/group.h"

namespace axonn::ops {

class Mailbox {
 public:
  // prefix  of the keys in the store; the same on all ranks, and never used twice
  // topic   opens the messages of errors
  // call_number  of the call that the ranks compare, if they do, for reports about waits
  Mailbox(const Group& group, c10::intrusive_ptr<c10d::Store> store, std::string prefix,
          std::string topic, double timeout_seconds, int64_t call_number = 0);

  // Posts the text. When it returns, every rank that looks finds the text.
  void post(const std::string& name, const std::string& text);
  // Posts a mark without a text, which peers may find a little later.
  void mark(const std::string& name);
  // Returns the text that the first rank to call this gave, which stays.
  std::string first(const std::string& name, const std::string& text);
  // Returns how many ranks have counted under this name, with this one.
  int64_t count(const std::string& name);
  // Deletes a text that no peer will read any more.
  void take_back(const std::string& name);
  // Waits until `peer` has posted `name`, or has posted a failure under it. Throws
  // CommunicationError, naming rank, peer and group, if the peer died, has gone on without posting
  // either, or the time is up.
  void wait(const std::string& name, int64_t peer);
  // Returns what `peer` posts, after waiting for it. Also throws CommunicationError if the peer
  // posted a failure.
  std::string read(const std::string& name, int64_t peer);
  // Returns the text that one of the ranks posts once all have come; until then, `mark` names what
  // each rank marks when it comes. Throws as above, naming the first rank that has not come.
  using NameOfRank = std::function<std::string(int64_t)>;
  std::string read(const std::string& name, const NameOfRank& mark);
  // Returns whether all of them have been posted.
  bool posted(const std::vector<std::string>& names);
  // Makes every peer that reads one of `names` that this rank has not posted get an error with
  // `reason`. Names that were posted stay as they are, so whether a peer goes on does not depend on
  // when it looks.
  void fail(const std::vector<std::string>& names, const std::string& reason) noexcept;

 private:
  std::string key(const std::string& name) const { return prefix_ + name; }
  // Runs `ask`, which asks the store something, and turns an error of the store into a
  // CommunicationError.
  template <typename Ask>
  auto in_store(Ask&& ask) const;
  // Waits for `name`, which one of `peers` posts; `late()` is the one that an error names.
  void wait_until_posted(const std::string& name, const std::vector<int64_t>& peers,
                         const std::function<int64_t()>& late);
  int64_t late_rank(const std::string& name, const NameOfRank& mark);
  int64_t first_absent(const NameOfRank& mark);
  std::string text_of(const std::string& name, int64_t peer);
  [[noreturn]] void refuse(const std::string& name, int64_t peer, const std::string& why) const;

  const Group& group_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  std::string topic_;
  double timeout_seconds_;
  int64_t call_number_;
  std::set<std::string> own_;  // names that this rank has posted
};

}  // namespace axonn::ops
