// Memory that several processes may map: an unnamed file in memory. Nothing of it is left when the
// last process that holds it ends, however it ends.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace axonn::gpu_machine {

class SharedFile {
 public:
  // Identifies the file in every process.
  struct Identity {
    dev_t device = 0;
    ino_t number = 0;
    bool operator==(const Identity&) const = default;
  };

  // Creates a file of zeros. All of these throw std::bad_alloc if memory or descriptors run out.
  static std::shared_ptr<const SharedFile> create(uint64_t bytes);
  // Returns the file behind a descriptor, which it duplicates.
  static std::shared_ptr<const SharedFile> of_descriptor(int descriptor);
  // Returns the file behind a descriptor of another process; null if that process has ended.
  static std::shared_ptr<const SharedFile> of_process(pid_t process, int descriptor);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  int descriptor() const { return descriptor_; }
  uint64_t bytes() const { return bytes_; }
  const Identity& identity() const { return identity_; }
  // Maps the bytes from `offset`, a multiple of the page size, at any address, until the last copy
  // of the pointer is gone.
  std::shared_ptr<std::byte> map(uint64_t offset, uint64_t bytes) const;
  // Maps the first bytes at this address. Returns false if the address is in use.
  bool map_at(uint64_t address, uint64_t bytes) const;

 private:
  explicit SharedFile(int descriptor);

  int descriptor_;
  uint64_t bytes_ = 0;
  Identity identity_;
};

}  // namespace axonn::gpu_machine
