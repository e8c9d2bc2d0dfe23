// Memory of devices and of CTAs, in allocations. Every access is checked: that it lies within an
// allocation, is aligned, reads only what was written, and races with no other.
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

// An address is the number of a window and an offset in it. So no two allocations are neighbours,
// and whatever runs out of one is found.
inline constexpr int kWindowBits = 36;
inline constexpr uint64_t kParamWindow = 1;   // of the launch
inline constexpr uint64_t kSharedWindow = 2;  // of the CTA
inline constexpr uint64_t kLocalWindow = 3;   // of the lane
inline constexpr uint64_t kFirstWindow = 16;  // of allocations

constexpr uint64_t window_start(uint64_t window) { return window << kWindowBits; }
constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Memory that is mapped several times has several addresses. An alias is the number of one of them.
inline constexpr uint8_t kMostAliases = 3;
inline constexpr uint8_t kMulticastAlias = 3;  // of all multicast addresses

// One access of a granule of memory; id 0 stands for none.
struct Mark {
  uint32_t actor : 26 = 0;
  uint32_t lane : 6 = 0;  // kWholeWarp for what is no lane's
  uint32_t time : 25 = 0;
  uint32_t scope : 3 = 0;  // of the access
  uint32_t proxy : 2 = 0;
  uint32_t alias : 2 = 0;  // by which address

  bool operator==(const Mark&) const = default;
};

inline constexpr uint32_t kWholeWarp = 63, kMostActors = 1u << 26;

// What is known of two bytes: the last write, and the last reads of two different actors.
struct Granule {
  Mark write;
  Mark reads[2];

  bool operator==(const Granule&) const = default;
};
inline constexpr uint64_t kGranuleBytes = 2;

// What a release left at an address, for those that acquire it.
struct Released {
  Clock clock;
  Scope scope = Scope::kNone;
  uint32_t actor = 0;
};

// What is known of a byte. Of an mbarrier's, only instructions of mbarriers may make use.
enum : uint8_t { kUnwritten, kWritten, kReserved };

// An array of zeros. Pages of it that nobody writes take no memory.
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

// The bytes of a region: its own, a part of a file, or memory of the host that lies elsewhere.
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
  // Nobody reads or writes them any more; their number is still known.
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
  Zeros<uint8_t> written;  // a byte each: kWritten if it was
  Zeros<Granule> granules;
  std::unordered_map<uint64_t, Released> released;  // by offset
  int device = -1;   // that must be enabled as a peer by others; -1: all reach it
  int lies_on = -1;  // the device of memory that all reach
  bool read_only = false;
  bool freed = false;
  bool is_shared = false;          // shared memory of a CTA
  bool is_host = false;            // memory of the host
  bool counts_as_written = false;  // all of it, as the host may write it at any time
  bool has_reserved = false;
  // Of memory that cuMemCreate makes:
  std::array<bool, kMostAliases> is_named{};  // by this alias
  std::shared_ptr<const SharedFile> file;     // that has the bytes
  int users = 0;                              // names, handles and teams; without any it is freed

  // Whether other processes may read and write it at any time.
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
  // Memory that lies elsewhere, where the host may write it at any time.
  Region(std::string region_name, void* host, uint64_t size)
      : name(std::move(region_name)),
        bytes(host, size),
        written(0),
        granules((size + kGranuleBytes - 1) / kGranuleBytes),
        counts_as_written(true) {}
  // The first bytes of a file, which other processes may write at any time if they reach it.
  Region(std::string region_name, std::shared_ptr<const SharedFile> of_file, uint64_t size,
         bool others_reach_it)
      : name(std::move(region_name)),
        bytes(of_file->map(0, size), size),
        written(others_reach_it ? 0 : size),
        granules((size + kGranuleBytes - 1) / kGranuleBytes),
        counts_as_written(others_reach_it),
        file(std::move(of_file)) {}

  // It is not used any more: what it takes is given back.
  void release() {
    freed = true;
    bytes.release();
    written = Zeros<uint8_t>(0);
    granules = Zeros<Granule>(0);
    released.clear();
    file.reset();
  }
};

// The allocations of all devices: unified addresses, as with peer access between them.
class Memory {
 public:
  Memory() = default;
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Returns the address of `bytes` bytes that nobody has written.
  // It lies on a device that others must enable as a peer; -1: all reach it.
  uint64_t allocate(uint64_t bytes, const std::string& name, int device = -1) {
    const uint64_t address = take_window();
    Region& region = place(address, Region(name, bytes));
    region.device = device;
    return address;
  }
  // Returns the address of zeros that the host may read and write at this same address; device -1
  // is the host itself, whose memory it then is. Throws std::bad_alloc if something else of the
  // process lies there.
  uint64_t allocate_for_host(uint64_t bytes, const std::string& name, int device);
  // The host can no longer reach what it could afterwards.
  void free(uint64_t address);

  // Returns null if no allocation has this window.
  Region* find(uint64_t address) {
    const uint64_t index = index_of(address);
    return index < windows_.size() ? windows_[index].region : nullptr;
  }
  // Which of its region's addresses this is; find() must have found one.
  uint8_t alias_of(uint64_t address) const { return windows_[index_of(address)].alias; }
  // The memory of each device that a multicast address names; null if it names none yet.
  const std::vector<Region*>* team_of(uint64_t address);

  // --- Mappings ---
  // Makes memory that has no address yet.
  Region& create(uint64_t bytes, const std::string& name) {
    return regions_.emplace_back(name, bytes);
  }
  // Returns an address that names nothing yet.
  uint64_t reserve() { return add_window({}); }
  // Lets a reserved address name a region that create() made. Returns false if the region has as
  // many addresses as there may be.
  bool map(uint64_t address, Region& region);
  // Lets it name the same place in the memory of several devices.
  void map_team(uint64_t address, const std::vector<Region*>& team) {
    map_team(address, [team] { return team; });
  }
  // Does so when it is used, since other processes may yet bring their memory: until then, `find`
  // returns an empty team.
  void map_team(uint64_t address, std::function<std::vector<Region*>()> find) {
    windows_[index_of(address)].find_team = std::move(find);
  }
  // Finds the team again when it is next used.
  void forget_team(uint64_t address);
  void unmap(uint64_t address);

  // --- Files ---
  // Makes memory that has no address yet, of a file's first bytes; or finds it, if it is there.
  Region& of_file(const std::shared_ptr<const SharedFile>& file, uint64_t bytes,
                  const std::string& name, bool others_reach_it);
  // Memory of files lives as long as somebody uses it, be it a name that map() gave or others.
  static void keep(Region& region) { ++region.users; }
  static void let_go(Region& region) {
    if (--region.users == 0 && region.file != nullptr) region.release();
  }
  // Lets the host read and write memory of files that is mapped from now on, at its addresses.
  void let_host_reach_files() { host_reaches_files_ = true; }

  // What the host does between runs, when no kernel is under way. Throws std::out_of_range unless
  // the bytes lie in one allocation; reading also throws if they were not all written.
  void write(uint64_t address, const void* source, uint64_t bytes);
  void read(uint64_t address, void* target, uint64_t bytes);

 private:
  // What an address names: a region, or the same place in the regions of several devices.
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
  // Returns an address for an allocation: a new one, or, if many are given away, the one that was
  // freed first.
  uint64_t take_window();
  Region& place(uint64_t address, Region region);
  Region& region_for_host(uint64_t address, uint64_t bytes);

  std::deque<Region> regions_;
  std::vector<Window> windows_;
  std::vector<uint64_t> of_host_;  // addresses of memory that the host reaches
  std::deque<uint64_t> freed_;     // addresses, the first one first
  bool host_reaches_files_ = false;
};

}  // namespace axonn::gpu_machine
