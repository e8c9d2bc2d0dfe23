// Whether this is still the process that something was made in, or a fork of it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace axonn::comm {

// A fork copies groups and their memory, but the child is no rank of them. Asking costs a load
// where the kernel can wipe a page in a fork (Linux 4.14), and a system call elsewhere.
class OwnProcess {
 public:
  OwnProcess();
  ~OwnProcess();
  OwnProcess(const OwnProcess&) = delete;
  OwnProcess& operator=(const OwnProcess&) = delete;

  bool is_this() const;
  // Throws the CommunicationError of an op that a fork of a group's rank has called.
  [[noreturn]] void refuse(const std::string& op, int64_t rank, const std::string& group) const;

 private:
  pid_t pid_;
  std::atomic<uint32_t>* mark_ = nullptr;  // 0 in a fork; null: ask the system
};

}  // namespace axonn::comm
