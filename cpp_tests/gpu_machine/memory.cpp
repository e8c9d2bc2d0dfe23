#include "gpu_machine/memory.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace axonn::gpu_machine {

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
