// Distinguishes the process that created an object from forks of that process.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace axonn::comm {

// A fork copies groups and their memory, but the child is not one of their ranks. A check costs one
// load if the kernel can wipe a page in a fork (Linux 4.14), and otherwise a system call.
class OwnProcess {
 public:
  OwnProcess();
  ~OwnProcess();
  OwnProcess(const OwnProcess&) = delete;
  OwnProcess& operator=(const OwnProcess&) = delete;

  bool is_this() const;
  // Throws the CommunicationError for an op that was called in a fork of a group's rank.
  [[noreturn]] void refuse(const std::string& op, int64_t rank, const std::string& group) const;

 private:
  pid_t pid_;
  std::atomic<uint32_t>* mark_ = nullptr;  // 0 in a fork; null: compare process ids
};

}  // namespace axonn::comm
