// Memory of devices and CTAs, in allocations. Every access is checked: it must lie within an
// allocation, be aligned, read only what was written, and not race with any other.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

#include "gpu_machine/clock.h"
#include "gpu_machine/shared_file.h"

namespace axonn::gpu_machine {

// An address is the number of a window and an offset in it. This keeps allocations apart, so that
// any overrun is noticed.
inline constexpr int kWindowBits = 36;
inline constexpr uint64_t kParamWindow = 1;   // parameters of the launch
inline constexpr uint64_t kSharedWindow = 2;  // shared memory of the CTA
inline constexpr uint64_t kLocalWindow = 3;   // local memory of the lane
inline constexpr uint64_t kFirstWindow = 16;  // the first one for allocations

constexpr uint64_t window_start(uint64_t window) { return window << kWindowBits; }
constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Memory that is mapped several times has several addresses; an alias is the number of one of them.
inline constexpr uint8_t kMostAliases = 3;
inline constexpr uint8_t kMulticastAlias = 3;  // for all multicast addresses

// One access to a granule of memory; actor 0 stands for none.
struct Mark {
  uint32_t actor : 26 = 0;
  uint32_t lane : 6 = 0;  // kWholeWarp if it is not one lane's access
  uint32_t time : 25 = 0;
  uint32_t scope : 3 = 0;  // of the access
  uint32_t proxy : 2 = 0;
  uint32_t alias : 2 = 0;  // the address that was used

  bool operator==(const Mark&) const = default;
};

inline constexpr uint32_t kWholeWarp = 63, kMostActors = 1u << 26;

// What is known of two bytes: the last write, and the last reads by two different actors.
struct Granule {
  Mark write;
  Mark reads[2];

  bool operator==(const Granule&) const = default;
};
inline constexpr uint64_t kGranuleBytes = 2;

// The state that a release leaves at an address, for agents that acquire it.
struct Released {
  Clock clock;
  Scope scope = Scope::kNone;
  uint32_t actor = 0;
};

// What is known of a byte. Only mbarrier instructions may use the reserved bytes of an mbarrier.
enum : uint8_t { kUnwritten, kWritten, kReserved };

// An array of zeros. Pages that are never written take no memory.
template <typename T>
class Zeros {
 public:
  explicit Zeros(uint64_t size)
      : begin_(static_cast<T*>(std::calloc(std::max<uint64_t>(size, 1), sizeof(T)))), size_(size) {
    if (begin_ == nullptr) throw std::bad_alloc();
  }

  T* data() { return begin_.get(); }
  const T* data() const { return begin_.get(); }
  T* begin() { return begin_.get(); }
  const T* begin() const { return begin_.get(); }
  T& operator[](uint64_t i) { return begin_[i]; }
  const T& operator[](uint64_t i) const { return begin_[i]; }
  uint64_t size() const { return size_; }

 private:
  struct Free {
    void operator()(T* begin) const { std::free(begin); }
  };
  std::unique_ptr<T[], Free> begin_;
  uint64_t size_;
};

// The bytes of a region: its own, part of a file, or host memory that lies elsewhere.
class Bytes {
 public:
  explicit Bytes(uint64_t size)
      : own_(std::make_unique<std::byte[]>(size)), begin_(own_.get()), size_(size) {
    std::fill_n(begin_, size, std::byte{0xCD});
  }
  Bytes(std::shared_ptr<std::byte> mapped, uint64_t size)
      : mapped_(std::move(mapped)), begin_(mapped_.get()), size_(size) {}
  Bytes(void* elsewhere, uint64_t size) : begin_(static_cast<std::byte*>(elsewhere)), size_(size) {}

  std::byte* data() { return begin_; }
  const std::byte* data() const { return begin_; }
  uint64_t size() const { return size_; }
  // Gives the bytes back; they must not be accessed any more, but size() still works.
  void release() {
    own_.reset();
    mapped_.reset();
    begin_ = nullptr;
  }

 private:
  std::unique_ptr<std::byte[]> own_;
  std::shared_ptr<std::byte> mapped_;
  std::byte* begin_;
  uint64_t size_;
};

struct Region {
  std::string name;
  Bytes bytes;
  Zeros<uint8_t> written;  // one entry per byte
  Zeros<Granule> granules;
  std::unordered_map<uint64_t, Released> released;  // by offset
  int device = -1;   // others must enable it as a peer; -1: all reach it
  int lies_on = -1;  // the device of memory that all can reach
  bool read_only = false;
  bool freed = false;
  bool is_shared = false;          // shared memory of a CTA
  bool is_host = false;            // memory of the host
  bool counts_as_written = false;  // the host may write any of it at any time
  bool has_reserved = false;
  // For memory that cuMemCreate makes:
  std::array<bool, kMostAliases> is_named{};  // aliases in use
  std::shared_ptr<const SharedFile> file;     // holds the bytes
  int users = 0;                              // names, handles and teams; freed when none is left

  // Whether other processes may access it at any time.
  bool is_of_processes() const { return file != nullptr && counts_as_written; }
  void mark(uint64_t offset, uint64_t size, uint8_t what) {
    if (!counts_as_written) std::fill_n(written.begin() + offset, size, what);
  }
  void reserve(uint64_t offset, uint64_t size) {
    mark(offset, size, kReserved);
    has_reserved = true;
  }
  void forget(uint64_t offset, uint64_t size) { mark(offset, size, kUnwritten); }

  Region(std::string region_name, uint64_t size)
      : name(std::move(region_name)),
        bytes(size),
        written(size),
        granules((size + kGranuleBytes - 1) / kGranuleBytes) {}
  // Memory that lies elsewhere, and that the host may write at any time.
  Region(std::string region_name, void* host, uint64_t size)
      : name(std::move(region_name)),
        bytes(host, size),
        written(0),
        granules((size + kGranuleBytes - 1) / kGranuleBytes),
        counts_as_written(true) {}
  // The first bytes of a file. If other processes reach it, they may write it at any time.
  Region(std::string region_name, std::shared_ptr<const SharedFile> of_file, uint64_t size,
         bool others_reach_it)
      : name(std::move(region_name)),
        bytes(of_file->map(0, size), size),
        written(others_reach_it ? 0 : size),
        granules((size + kGranuleBytes - 1) / kGranuleBytes),
        counts_as_written(others_reach_it),
        file(std::move(of_file)) {}

  // Frees the memory that an unused region takes.
  void release() {
    freed = true;
    bytes.release();
    written = Zeros<uint8_t>(0);
    granules = Zeros<Granule>(0);
    released.clear();
    file.reset();
  }
};

// The allocations of all devices, in one address space, as with peer access between devices.
class Memory {
 public:
  Memory() = default;
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Returns the address of `bytes` unwritten bytes. They lie on a device that others must enable as
  // a peer; -1: all reach them.
  uint64_t allocate(uint64_t bytes, const std::string& name, int device = -1) {
    const uint64_t address = take_window();
    Region& region = place(address, Region(name, bytes));
    region.device = device;
    return address;
  }
  // Returns the address of zeros that the host can access at the same address. Device -1 is the
  // host itself, so that it is host memory. Throws std::bad_alloc if the process already uses these
  // addresses.
  uint64_t allocate_for_host(uint64_t bytes, const std::string& name, int device);
  // The host can no longer access memory of allocate_for_host after this.
  void free(uint64_t address);

  // Returns null if no allocation has this window.
  Region* find(uint64_t address) {
    const uint64_t index = index_of(address);
    return index < windows_.size() ? windows_[index].region : nullptr;
  }
  // Returns the alias of this address in its region; find() must have found one.
  uint8_t alias_of(uint64_t address) const { return windows_[index_of(address)].alias; }
  // The memory of each device behind a multicast address; null if there is none yet.
  const std::vector<Region*>* team_of(uint64_t address);

  // --- Mappings ---
  // Creates memory without an address.
  Region& create(uint64_t bytes, const std::string& name) {
    return regions_.emplace_back(name, bytes);
  }
  // Returns an address without memory.
  uint64_t reserve() { return add_window({}); }
  // Lets a reserved address name a region from create(). Returns false if the region already has
  // the maximum number of addresses.
  bool map(uint64_t address, Region& region);
  // Lets the address name the same place in the memory of several devices.
  void map_team(uint64_t address, const std::vector<Region*>& team) {
    map_team(address, [team] { return team; });
  }
  // Finds the team at the first use, since other processes may still have to bring their memory:
  // until they have, `find` returns an empty team.
  void map_team(uint64_t address, std::function<std::vector<Region*>()> find) {
    windows_[index_of(address)].find_team = std::move(find);
  }
  // Makes the next use find the team again.
  void forget_team(uint64_t address);
  void unmap(uint64_t address);

  // --- Files ---
  // Creates memory without an address from a file's first bytes, or finds it if it exists already.
  Region& of_file(const std::shared_ptr<const SharedFile>& file, uint64_t bytes,
                  const std::string& name, bool others_reach_it);
  // Memory of files lives as long as it has users: names from map(), or others.
  static void keep(Region& region) { ++region.users; }
  static void let_go(Region& region) {
    if (--region.users == 0 && region.file != nullptr) region.release();
  }
  // Lets the host access file memory that is mapped from now on, at its addresses.
  void let_host_reach_files() { host_reaches_files_ = true; }

  // Host accesses between runs, while no kernel is running. Throws std::out_of_range unless the
  // bytes lie in one allocation; reading also throws if some of them were never written.
  void write(uint64_t address, const void* source, uint64_t bytes);
  void read(uint64_t address, void* target, uint64_t bytes);

 private:
  // What an address names: a region, or the same place in regions of several devices.
  struct Window {
    Region* region = nullptr;
    uint8_t alias = 0;
    std::vector<Region*> team{};
    std::function<std::vector<Region*>()> find_team{};
  };

  static uint64_t index_of(uint64_t address) { return (address >> kWindowBits) - kFirstWindow; }
  uint64_t add_window(const Window& window) {
    windows_.push_back(window);
    return window_start(kFirstWindow + windows_.size() - 1);
  }
  // Returns an address for an allocation: a new one or, if many have been given out, the one that
  // was freed first.
  uint64_t take_window();
  Region& place(uint64_t address, Region region);
  Region& region_for_host(uint64_t address, uint64_t bytes);

  std::deque<Region> regions_;
  std::vector<Window> windows_;
  std::vector<uint64_t> of_host_;  // addresses of memory that the host can access
  std::deque<uint64_t> freed_;     // addresses, oldest first
  bool host_reaches_files_ = false;
};

}  // namespace axonn::gpu_machine
