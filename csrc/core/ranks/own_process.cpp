#include "core/ranks/own_process.h"

#include <sys/mman.h>
#include <unistd.h>

#include "core/ranks/errors.h"

namespace axonn::comm {
namespace {

constexpr size_t kPageBytes = 4096;

}  // namespace

OwnProcess::OwnProcess() : pid_(getpid()) {
  void* page =
      mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return;
  if (madvise(page, kPageBytes, MADV_WIPEONFORK) != 0) {
    munmap(page, kPageBytes);
    return;
  }
  mark_ = static_cast<std::atomic<uint32_t>*>(page);
  mark_->store(1, std::memory_order_relaxed);
}

OwnProcess::~OwnProcess() {
  if (mark_ != nullptr) munmap(mark_, kPageBytes);
}

bool OwnProcess::is_this() const {
  return mark_ != nullptr ? mark_->load(std::memory_order_relaxed) == 1 : getpid() == pid_;
}

void OwnProcess::refuse(const std::string& op, int64_t rank, const std::string& group) const {
  throw CommunicationError(op + ": process " + std::to_string(getpid()) + " is a fork of rank " +
                           std::to_string(rank) + " of group " + group +
                           " and no rank of it; start processes with 'spawn', or create the "
                           "process group after the fork");
}

}  // namespace axonn::comm
