#include "core/symmetric/shared_segment.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <fstream>
#include <random>
#include <string_view>
#include <utility>

#include "core/ranks/errors.h"

namespace axonn::comm {

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)) {}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void FileDescriptor::reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

namespace {

// Clones of a virtual machine may start with equal states of their random generators, but their
// clocks differ by more than a nanosecond.
uint64_t draw_nonce() {
  std::random_device random;
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  return (uint64_t{random()} << 32 | random()) ^ static_cast<uint64_t>(now);
}

std::string mark_of(uint64_t nonce) { return "#" + std::to_string(nonce) + "#"; }

// An in-memory file keeps its name, whichever process has it open.
void check_mark(int fd, uint64_t nonce, const std::string& path) {
  std::array<char, 512> name{};
  const auto link = "/proc/self/fd/" + std::to_string(fd);
  if (readlink(link.c_str(), name.data(), name.size() - 1) < 0)
    throw_errno("readlink(" + link + ")");
  if (std::string_view(name.data()).find(mark_of(nonce)) != std::string_view::npos) return;
  throw CommunicationError(path +
                           " is other memory than the peer's, whose host looks like this one "
                           "(a clone of its virtual machine?)");
}

}  // namespace

SharedSegment SharedSegment::create(const std::string& name, int64_t bytes) {
  const uint64_t nonce = draw_nonce();
  FileDescriptor fd(memfd_create((name + mark_of(nonce)).c_str(), MFD_CLOEXEC));
  if (fd.get() < 0) throw_errno("memfd_create(" + name + ")");
  if (ftruncate(fd.get(), bytes) != 0) {
    throw_errno("cannot size a shared-memory segment to " + std::to_string(bytes) + " bytes");
  }
  return SharedSegment(std::move(fd), nonce, bytes, PROT_READ | PROT_WRITE);
}

void SharedSegment::populate(int64_t offset, int64_t bytes) const {
#ifdef MADV_POPULATE_WRITE
  const auto page = static_cast<int64_t>(sysconf(_SC_PAGESIZE));
  const int64_t begin = offset / page * page;
  madvise(data_ + begin, static_cast<size_t>(offset + bytes - begin), MADV_POPULATE_WRITE);
#endif
}

SharedSegment SharedSegment::open(pid_t pid, int fd, uint64_t nonce, int64_t bytes, Access access) {
  const bool writes = access == Access::kWrite;
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  FileDescriptor opened(::open(path.c_str(), (writes ? O_RDWR : O_RDONLY) | O_CLOEXEC));
  if (opened.get() < 0) throw_errno("open(" + path + ")");
  check_mark(opened.get(), nonce, path);
  // Reading past the end of a file kills the process (SIGBUS), so a file of the wrong size is
  // refused here.
  struct stat status;
  if (fstat(opened.get(), &status) != 0) throw_errno("fstat(" + path + ")");
  if (status.st_size != bytes) {
    errno = EINVAL;
    throw_errno(path + " has " + std::to_string(status.st_size) + " bytes, expected " +
                std::to_string(bytes));
  }
  const int protection = writes ? PROT_READ | PROT_WRITE : PROT_READ;
  SharedSegment segment(std::move(opened), nonce, bytes, protection);
  segment.close_descriptor();
  return segment;
}

SharedSegment::SharedSegment(FileDescriptor fd, uint64_t nonce, int64_t bytes, int protection)
    : fd_(std::move(fd)), nonce_(nonce), size_(bytes) {
  void* mapped = mmap(nullptr, static_cast<size_t>(bytes), protection, MAP_SHARED | MAP_NORESERVE,
                      fd_.get(), 0);
  if (mapped == MAP_FAILED) {
    throw_errno("cannot map " + std::to_string(bytes) +
                " bytes of address space for symmetric memory (ulimit -v?)");
  }
  // Without this, a core dump would read, and thereby allocate, every page of a sparse segment.
  madvise(mapped, static_cast<size_t>(bytes), MADV_DONTDUMP);
  data_ = static_cast<std::byte*>(mapped);
}

SharedSegment::SharedSegment(SharedSegment&& other) noexcept
    : fd_(std::move(other.fd_)),
      nonce_(other.nonce_),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

SharedSegment::~SharedSegment() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_));
}

// pidfd_open needs Linux 5.3. Without it the process id is used, and a dead peer that has not been
// reaped yet counts as alive until the wait's own timeout.
ProcessWatch::ProcessWatch(pid_t pid)
    : pid_(pid), fd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {}

bool ProcessWatch::alive() const {
  if (fd_.get() < 0) return kill(pid_, 0) == 0 || errno == EPERM;
  pollfd request{fd_.get(), POLLIN, 0};  // readable once the process has ended
  return poll(&request, 1, 0) == 0;
}

std::string host_identity() {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  std::array<char, 256> hostname{}, pid_namespace{};
  gethostname(hostname.data(), hostname.size() - 1);
  if (readlink("/proc/self/ns/pid", pid_namespace.data(), pid_namespace.size() - 1) < 0) {
    pid_namespace[0] = '\0';
  }
  return std::string(hostname.data()) + "|" + boot_id + "|" + pid_namespace.data();
}

}  // namespace axonn::comm
