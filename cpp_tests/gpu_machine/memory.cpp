#include "gpu_machine/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

namespace axonn::gpu_machine {

Memory::~Memory() {
  while (!pinned_.empty()) free(pinned_.back());
}

// A window is larger than any allocation, and a multiple of pages.
uint64_t Memory::allocate_pinned(uint64_t bytes, const std::string& name) {
  const uint64_t address = window_start(kFirstWindow + windows_.size());
  void* wanted = reinterpret_cast<void*>(address);
  void* got = mmap(wanted, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (got != wanted) {
    if (got != MAP_FAILED) munmap(got, bytes);
    throw std::bad_alloc();
  }
  regions_.emplace_back(name, got, bytes);
  add_window({&regions_.back(), 0, {}});
  pinned_.push_back(address);
  return address;
}

void Memory::free(uint64_t address) {
  Region& region = *find(address);
  region.freed = true;
  if (std::erase(pinned_, address) != 0) munmap(region.bytes.data(), region.bytes.size());
}

bool Memory::map(uint64_t address, Region& region) {
  const auto free = std::find(region.is_named.begin(), region.is_named.end(), false);
  if (free == region.is_named.end()) return false;
  *free = true;
  windows_[index_of(address)] = {&region, static_cast<uint8_t>(free - region.is_named.begin()), {}};
  return true;
}

void Memory::unmap(uint64_t address) {
  Window& window = windows_[index_of(address)];
  if (window.region != nullptr) window.region->is_named[window.alias] = false;
  window = {};
}

Region& Memory::region_for_host(uint64_t address, uint64_t bytes) {
  Region* region = find(address);
  const uint64_t offset = address & (window_start(1) - 1);
  if (region == nullptr || region->freed || offset + bytes > region->bytes.size()) {
    throw std::out_of_range("the host reaches outside an allocation");
  }
  return *region;
}

void Memory::write(uint64_t address, const void* source, uint64_t bytes) {
  Region& region = region_for_host(address, bytes);
  const uint64_t offset = address & (window_start(1) - 1);
  if (bytes != 0) std::memcpy(region.bytes.data() + offset, source, bytes);
  std::fill_n(region.written.begin() + static_cast<int64_t>(offset), bytes, uint8_t{1});
}

void Memory::read(uint64_t address, void* target, uint64_t bytes) {
  const Region& region = region_for_host(address, bytes);
  const uint64_t offset = address & (window_start(1) - 1);
  const auto begin = region.written.begin() + static_cast<int64_t>(offset);
  if (std::find(begin, begin + static_cast<int64_t>(bytes), uint8_t{0}) !=
      begin + static_cast<int64_t>(bytes)) {
    throw std::out_of_range("the host reads bytes of " + region.name + " that nobody has written");
  }
  if (bytes != 0) std::memcpy(target, region.bytes.data() + offset, bytes);
}

}  // namespace axonn::gpu_machine
