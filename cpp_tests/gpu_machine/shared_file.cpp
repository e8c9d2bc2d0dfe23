#include "gpu_machine/shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <new>
#include <stdexcept>
#include <string>

namespace axonn::gpu_machine {

SharedFile::SharedFile(int descriptor) : descriptor_(descriptor) {
  struct stat status{};
  if (descriptor < 0 || fstat(descriptor, &status) != 0) {
    throw std::invalid_argument("expected the descriptor of an open file");
  }
  bytes_ = static_cast<uint64_t>(status.st_size);
  identity_ = {status.st_dev, status.st_ino};
}

SharedFile::~SharedFile() { close(descriptor_); }

std::shared_ptr<const SharedFile> SharedFile::create(uint64_t bytes) {
  const int descriptor = memfd_create("memory of a GPU in software", MFD_CLOEXEC);
  if (descriptor < 0) throw std::bad_alloc();
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    close(descriptor);
    throw std::bad_alloc();
  }
  return std::shared_ptr<const SharedFile>(new SharedFile(descriptor));
}

std::shared_ptr<const SharedFile> SharedFile::of_descriptor(int descriptor) {
  return std::shared_ptr<const SharedFile>(new SharedFile(fcntl(descriptor, F_DUPFD_CLOEXEC, 0)));
}

std::shared_ptr<const SharedFile> SharedFile::of_process(pid_t process, int descriptor) {
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
  const int own = open(path.c_str(), O_RDWR | O_CLOEXEC);
  return own < 0 ? nullptr : std::shared_ptr<const SharedFile>(new SharedFile(own));
}

std::shared_ptr<std::byte> SharedFile::map(uint64_t offset, uint64_t bytes) const {
  void* const got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_,
                         static_cast<off_t>(offset));
  if (got == MAP_FAILED) throw std::bad_alloc();
  return {static_cast<std::byte*>(got), [bytes](std::byte* begin) { munmap(begin, bytes); }};
}

bool SharedFile::map_at(uint64_t address, uint64_t bytes) const {
  void* const wanted = reinterpret_cast<void*>(address);
  void* const got =
      mmap(wanted, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, descriptor_, 0);
  if (got == wanted) return true;
  if (got != MAP_FAILED) munmap(got, bytes);
  return false;
}

}  // namespace axonn::gpu_machine
