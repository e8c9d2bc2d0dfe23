#include "gpu_machine/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

namespace axonn::gpu_machine {

Memory::~Memory() {
  while (!of_host_.empty()) free(of_host_.back());
  for (uint64_t i = 0; i < windows_.size(); ++i) unmap(window_start(kFirstWindow + i));
}

uint64_t Memory::take_window() {
  constexpr size_t kNewWindows = 512;  // late reuse, so that uses of freed memory are noticed
  if (windows_.size() < kNewWindows || freed_.empty()) return add_window({});
  const uint64_t address = freed_.front();
  freed_.pop_front();
  return address;
}

Region& Memory::place(uint64_t address, Region region) {
  Window& window = windows_[index_of(address)];
  if (window.region == nullptr) {
    window.region = &regions_.emplace_back(std::move(region));
  } else {
    *window.region = std::move(region);
  }
  return *window.region;
}

// A window is larger than any allocation, and is a whole number of pages.
uint64_t Memory::allocate_for_host(uint64_t bytes, const std::string& name, int device) {
  const uint64_t address = take_window();
  void* wanted = reinterpret_cast<void*>(address);
  void* got = mmap(wanted, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (got != wanted) {
    if (got != MAP_FAILED) munmap(got, bytes);
    throw std::bad_alloc();
  }
  Region& region = place(address, Region(name, got, bytes));
  region.is_host = device < 0;
  region.device = device;
  of_host_.push_back(address);
  return address;
}

void Memory::free(uint64_t address) {
  Region& region = *find(address);
  if (std::erase(of_host_, address) != 0) munmap(region.bytes.data(), region.bytes.size());
  region.release();
  freed_.push_back(address);
}

bool Memory::map(uint64_t address, Region& region) {
  const auto free = std::find(region.is_named.begin(), region.is_named.end(), false);
  if (free == region.is_named.end()) return false;
  if (host_reaches_files_ && region.file != nullptr &&
      !region.file->map_at(address, region.bytes.size())) {
    return false;
  }
  *free = true;
  const auto alias = static_cast<uint8_t>(free - region.is_named.begin());
  windows_[index_of(address)] = {&region, alias, {}, nullptr};
  keep(region);
  return true;
}

void Memory::unmap(uint64_t address) {
  Window& window = windows_[index_of(address)];
  if (Region* const region = window.region) {
    region->is_named[window.alias] = false;
    if (host_reaches_files_ && region->file != nullptr) {
      munmap(reinterpret_cast<void*>(address), region->bytes.size());
    }
    let_go(*region);
  }
  forget_team(address);
  window = {};
}

void Memory::forget_team(uint64_t address) {
  for (Region* region : std::exchange(windows_[index_of(address)].team, {})) let_go(*region);
}

const std::vector<Region*>* Memory::team_of(uint64_t address) {
  const uint64_t index = index_of(address);
  if (index >= windows_.size()) return nullptr;
  Window& window = windows_[index];
  if (window.team.empty() && window.find_team != nullptr) {
    window.team = window.find_team();
    for (Region* region : window.team) keep(*region);
  }
  return window.team.empty() ? nullptr : &window.team;
}

Region& Memory::of_file(const std::shared_ptr<const SharedFile>& file, uint64_t bytes,
                        const std::string& name, bool others_reach_it) {
  for (Region& region : regions_) {
    if (region.file != nullptr && region.file->identity() == file->identity()) return region;
  }
  return regions_.emplace_back(name, file, bytes, others_reach_it);
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
  region.mark(offset, bytes, kWritten);
}

void Memory::read(uint64_t address, void* target, uint64_t bytes) {
  const Region& region = region_for_host(address, bytes);
  const uint64_t offset = address & (window_start(1) - 1);
  const uint8_t* begin = region.written.begin() + offset;
  if (!region.counts_as_written && std::find(begin, begin + bytes, kUnwritten) != begin + bytes) {
    throw std::out_of_range("the host reads bytes of " + region.name + " that nobody has written");
  }
  if (bytes != 0) std::memcpy(target, region.bytes.data() + offset, bytes);
}

}  // namespace axonn::gpu_machine
