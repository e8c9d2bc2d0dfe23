#include "gpu_machine/runtime/mappings.h"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <string>
#include <utility>

namespace axonn::gpu_machine {
namespace {

constexpr uint64_t kPage = 4096;
static_assert(sizeof(Description) <= kPage);
static_assert(std::atomic<int>::is_always_lock_free, "processes share them");

std::shared_ptr<Description> description_in(const SharedFile& file) {
  const auto page = file.map(file.bytes() - kPage, kPage);
  return {page, reinterpret_cast<Description*>(page.get())};
}

}  // namespace

// --- Multicast objects
// ----------------------------------------------------------------------------

bool Description::add(int device) {
  for (unsigned i = 0; i < num_devices_; ++i) {
    int free = -1;
    if (members_[i].device.compare_exchange_strong(free, device)) return true;
    if (free == device) return false;
  }
  return false;
}

bool Description::is_complete() const {
  return std::all_of(members_, members_ + num_devices_,
                     [](const Member& member) { return member.device >= 0; });
}

bool Description::has(int device) const {
  return std::any_of(members_, members_ + num_devices_,
                     [device](const Member& member) { return member.device == device; });
}

Description::Member* Description::member_of(int device) {
  Member* const end = members_ + num_devices_;
  Member* const found = std::find_if(
      members_, end, [device](const Member& member) { return member.device == device; });
  return found == end ? nullptr : found;
}

bool Description::bind(int device, const SharedFile& memory) {
  Member* const member = member_of(device);
  int unbound = kUnbound;
  if (member == nullptr || !member->state.compare_exchange_strong(unbound, kBinding)) return false;
  member->process = getpid();
  member->descriptor = memory.descriptor();
  member->state = kBound;
  return true;
}

bool Description::unbind(int device) {
  Member* const member = member_of(device);
  int bound = kBound;
  return member != nullptr && member->state.compare_exchange_strong(bound, kUnbound);
}

std::vector<std::shared_ptr<const SharedFile>> Description::bound() const {
  std::map<int, std::shared_ptr<const SharedFile>> by_device;
  for (unsigned i = 0; i < num_devices_; ++i) {
    const Member& member = members_[i];
    if (member.state != kBound) return {};
    auto file = SharedFile::of_process(member.process, member.descriptor);
    if (file == nullptr) return {};
    by_device[member.device] = std::move(file);
  }
  std::vector<std::shared_ptr<const SharedFile>> all;
  for (auto& [device, file] : by_device) all.push_back(std::move(file));
  return all;
}

// --- Handles -------------------------------------------------------------------------------------

uint64_t Mappings::create(Memory& memory, const Description& description, bool is_shareable) {
  const uint64_t bytes = description.is_multicast() ? 0 : description.bytes();
  Handle made;
  made.file = SharedFile::create(bytes + kPage);
  made.description = description_in(*made.file);
  new (made.description.get()) Description(description);
  made.is_shareable = is_shareable;
  return add(memory, std::move(made));
}

std::optional<uint64_t> Mappings::import(Memory& memory, int descriptor) {
  Handle made;
  made.file = SharedFile::of_descriptor(descriptor);
  if (made.file->bytes() < kPage || made.file->bytes() % kPage != 0) return std::nullopt;
  made.description = description_in(*made.file);
  if (!made.description->is_known()) return std::nullopt;
  made.is_shareable = true;
  return add(memory, std::move(made));
}

uint64_t Mappings::add(Memory& memory, Handle handle) {
  const Description& description = *handle.description;
  if (!description.is_multicast()) {
    const std::string name = "memory of device " + std::to_string(description.device());
    handle.region = &memory.of_file(handle.file, description.bytes(), name, handle.is_shareable);
    handle.region->lies_on = description.device();
    Memory::keep(*handle.region);
  }
  handles.emplace(++last_handle_, std::move(handle));
  return last_handle_;
}

Mappings::Handle* Mappings::find(uint64_t handle) {
  const auto found = handles.find(handle);
  return found == handles.end() ? nullptr : &found->second;
}

void Mappings::release(uint64_t handle) {
  Handle& gone = *find(handle);
  if (gone.region != nullptr) Memory::let_go(*gone.region);
  for (Region* region : gone.bound) {
    gone.description->unbind(region->lies_on);  // before the descriptor may be that of another file
    Memory::let_go(*region);
  }
  handles.erase(handle);
}

}  // namespace axonn::gpu_machine
