// Memory that several processes of one host map. It is an anonymous file (memfd_create) that peers
// open through /proc/<pid>/fd, so there is nothing to unlink. It is freed when the last process
// that maps it has ended, even after kill -9, and does not count against the 64 MB /dev/shm of a
// container.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace axonn::comm {

// A file descriptor that is closed at the end of its scope.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor() { reset(); }

  int get() const { return fd_; }
  void reset();

 private:
  int fd_ = -1;
};

// A mapping of a whole segment. The kernel allocates its pages when they are first written.
class SharedSegment {
 public:
  // Creates a file of `bytes` zeros; `name` and a random number show in /proc/<pid>/maps.
  static SharedSegment create(const std::string& name, int64_t bytes);
  enum class Access { kRead, kWrite };
  // Opens the segment that process `pid` holds as descriptor `fd`. `nonce` verifies it, because
  // hosts that are clones of a virtual machine have processes and descriptors with equal numbers.
  // If only the creator writes, kRead keeps its peers from writing.
  static SharedSegment open(pid_t pid, int fd, uint64_t nonce, int64_t bytes,
                            Access access = Access::kRead);

  SharedSegment(SharedSegment&& other) noexcept;
  SharedSegment& operator=(SharedSegment&&) = delete;
  ~SharedSegment();

  // Allocates the pages of these bytes now, not when they are first written. A kernel that cannot
  // (before Linux 5.14) allocates them later.
  void populate(int64_t offset, int64_t bytes) const;

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  int fd() const { return fd_.get(); }
  uint64_t nonce() const { return nonce_; }
  // Call it once peers have mapped the segment: the descriptor is no longer needed.
  void close_descriptor() { fd_.reset(); }

 private:
  SharedSegment(FileDescriptor fd, uint64_t nonce, int64_t bytes, int protection);

  FileDescriptor fd_;
  uint64_t nonce_ = 0;
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

// Tells whether a process of this host still runs, through a descriptor that a reused process id
// cannot fool.
class ProcessWatch {
 public:
  explicit ProcessWatch(pid_t pid);
  bool alive() const;

 private:
  pid_t pid_;
  FileDescriptor fd_;
};

// Equal on two processes that can access each other's /proc: same boot, same namespace. It may also
// be equal on hosts that are clones, which SharedSegment::open then detects.
std::string host_identity();

}  // namespace axonn::comm
