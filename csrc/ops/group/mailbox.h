// Short texts that the ranks of a group leave for each other in its c10d store: what they must
// agree on outside of any collective. Milliseconds, not microseconds: nothing for a training step.
// A name is "what/...": messages say what was waited for.
#pragma once

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
  Mailbox(const Group& group, c10::intrusive_ptr<c10d::Store> store, std::string prefix,
          std::string topic, double timeout_seconds);

  // When it returns, every rank that looks finds the text.
  void post(const std::string& name, const std::string& text);
  // No peer will read it any more.
  void take_back(const std::string& name);
  // Waits until `peer` has posted it, or failed to. Throws CommunicationError, naming rank, peer
  // and group, if the peer died, has gone on without either, or the time is up.
  void wait(const std::string& name, int64_t peer);
  // What `peer` posts, after waiting for it. Throws CommunicationError also if the peer failed.
  std::string read(const std::string& name, int64_t peer);
  // Whether all of them are there already.
  bool posted(const std::vector<std::string>& names);
  // Every peer that reads one of `names` that this rank has not posted gets an error that holds
  // `reason`. Those posted stand: whether a peer goes on is no matter of when it looks.
  void fail(const std::vector<std::string>& names, const std::string& reason) noexcept;

 private:
  std::string key(const std::string& name) const { return prefix_ + name; }
  // What asks the store something; an error of the store's becomes a CommunicationError.
  template <typename Ask>
  auto in_store(Ask&& ask) const;
  [[noreturn]] void refuse(const std::string& name, int64_t peer, const std::string& why) const;

  const Group& group_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  std::string topic_;
  double timeout_seconds_;
  std::set<std::string> own_;  // names that this rank has posted
};

}  // namespace axonn::ops
