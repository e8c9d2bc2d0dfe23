// Short texts that the ranks of a group leave for each other in its c10d store, to agree on
// something outside of any collective. An exchange takes milliseconds, not microseconds, so it does
// not belong in a training step. Names have the form "what/..."; messages quote the first part to
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
  // call_number  number of the call that the ranks compare, if any, for reports about waits
  Mailbox(const Group& group, c10::intrusive_ptr<c10d::Store> store, std::string prefix,
          std::string topic, double timeout_seconds, int64_t call_number = 0);

  // Posts the text. Every rank that looks after this has returned finds it.
  void post(const std::string& name, const std::string& text);
  // Posts a mark without a text, which peers may find a little later.
  void mark(const std::string& name);
  // Posts the text unless a rank has done so before. Returns the text of the first rank.
  std::string first(const std::string& name, const std::string& text);
  // Counts this rank under `name`. Returns how many ranks have been counted so far.
  int64_t count(const std::string& name);
  // Deletes a text that no peer will read any more.
  void take_back(const std::string& name);
  // Waits until `peer` has posted `name`, or a failure under that name. Throws CommunicationError,
  // naming rank, peer and group, if the peer died, has gone on without posting either, or the time
  // is up.
  void wait(const std::string& name, int64_t peer);
  // Returns the text that `peer` posts, after waiting for it. Also throws CommunicationError if the
  // peer posted a failure.
  std::string read(const std::string& name, int64_t peer);
  // Returns the text that one of the ranks posts once all have come. `mark` gives the name of the
  // mark that a rank leaves when it comes. Throws as above, naming the first rank without a mark.
  using NameOfRank = std::function<std::string(int64_t)>;
  std::string read(const std::string& name, const NameOfRank& mark);
  // Returns whether all of these names have been posted.
  bool posted(const std::vector<std::string>& names);
  // Makes every peer that reads one of `names` get an error with `reason`, unless this rank has
  // posted that name. Posted names stay as they are, so whether a peer goes on does not depend on
  // when it looks.
  void fail(const std::vector<std::string>& names, const std::string& reason) noexcept;

 private:
  std::string key(const std::string& name) const { return prefix_ + name; }
  // Runs `ask`, which queries the store, and turns an error of the store into a
  // CommunicationError.
  template <typename Ask>
  auto in_store(Ask&& ask) const;
  // Waits for `name`, which one of `peers` posts; an error names the rank that `late()` returns.
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
