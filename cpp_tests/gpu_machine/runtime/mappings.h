// Objects made by the driver's functions for virtual memory. Processes share them as files, each of
// which has, after its bytes, a page that describes it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "gpu_machine/memory.h"

namespace axonn::gpu_machine {

// The page after the bytes of device memory, or that of a multicast object, which has no bytes. All
// processes that have the object see it.
class Description {
 public:
  static constexpr unsigned kMostDevices = 64;  // per team

  Description(uint64_t bytes, int device) : bytes_(bytes), device_(device) {}
  static Description of_multicast(uint64_t bytes, unsigned num_devices) {
    Description made(bytes, -1);
    made.num_devices_ = num_devices;
    return made;
  }
  Description(const Description& other)
      : bytes_(other.bytes_), device_(other.device_), num_devices_(other.num_devices_) {}
  Description& operator=(const Description&) = delete;

  bool is_known() const { return magic_ == kMagic; }
  uint64_t bytes() const { return bytes_; }
  int device() const { return device_; }
  bool is_multicast() const { return num_devices_ != 0; }

  // --- For multicast objects ---
  // Adds a device to the team. Returns false if it is in it already, or the team is complete.
  bool add(int device);
  bool is_complete() const;
  bool has(int device) const;
  // Binds memory of this process for a device. Returns false if the device already has some.
  bool bind(int device, const SharedFile& memory);
  // Unbinds the memory of a device. Returns false if it has none.
  bool unbind(int device);
  // Returns the memory of all devices, in their order; empty until all have bound some.
  std::vector<std::shared_ptr<const SharedFile>> bound() const;

 private:
  static constexpr uint64_t kMagic = 0x61786F6E6E475055;
  enum State : int { kUnbound, kBinding, kBound };
  struct Member {
    std::atomic<int> device = -1;
    std::atomic<int> state = kUnbound;
    int process = 0, descriptor = -1;  // of the bound memory
  };
  Member* member_of(int device);

  uint64_t magic_ = kMagic;
  uint64_t bytes_;
  int device_;
  unsigned num_devices_ = 0;  // in the team
  Member members_[kMostDevices];
};

struct Mappings {
  struct Handle {
    std::shared_ptr<const SharedFile> file;
    std::shared_ptr<Description> description;
    Region* region = nullptr;      // the bytes; null for a multicast object
    bool is_shareable = false;     // with other processes
    std::vector<Region*> bound{};  // by this process, to a multicast object
  };
  struct Reserved {
    uint64_t bytes = 0;
    uint64_t handle = 0;  // the handle mapped there; 0 if none
  };

  // Creates an object with this description, and returns a handle to it.
  uint64_t create(Memory& memory, const Description& description, bool is_shareable);
  // Returns a handle to the object behind a descriptor; nothing if it is not one.
  std::optional<uint64_t> import(Memory& memory, int descriptor);
  Handle* find(uint64_t handle);
  void release(uint64_t handle);

  std::map<uint64_t, Handle> handles;
  std::map<uint64_t, Reserved> reserved;  // by address

 private:
  uint64_t add(Memory& memory, Handle handle);
  uint64_t last_handle_ = 0;
};

}  // namespace axonn::gpu_machine
