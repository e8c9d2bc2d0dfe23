// A warp: 32 lanes, each with its own registers, which may be at different instructions.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gpu_machine/agent.h"
#include "gpu_machine/async_groups.h"
#include "gpu_machine/errors.h"
#include "gpu_machine/memory.h"
#include "gpu_machine/program.h"

namespace axonn::gpu_machine {

struct Launch;
struct Cta;
struct Barrier;
class CopyGroups;
class Products;

// A kernel's name for messages, with the middle of long names left out.
std::string short_name(const std::string& name);

// Where an instruction was issued; for messages.
struct Origin {
  const Launch& launch;
  Dim cta;
  int warp;
  int lane;  // -1 for the whole warp
  uint32_t pc;

  std::string describe() const;
};

// Lanes at the same instruction. The lanes of a warp that have not exited are divided into
// fragments; two that are ready at the same instruction merge.
struct Fragment {
  // kWaiting means until its instruction is ready.
  enum class State : uint8_t { kReady, kAtMeeting, kAtBarrier, kWaiting };
  uint32_t pc = 0;
  uint32_t mask = 0;
  State state = State::kReady;
  uint32_t barrier = 0;
};

class Warp final : public Agent {
 public:
  Warp(Machine& machine, Launch& launch, Cta& cta, int index, uint32_t lanes);
  ~Warp() override;

  // Runs at most this many instructions. Returns how many it ran: fewer if it has to wait.
  int run(int quantum);
  bool has_exited() const { return fragments_.empty(); }
  // Whether no fragment can continue until something happens outside the warp.
  bool is_blocked();
  uint32_t live_lanes() const;
  // "waits at barrier 1", "polls flag + 128": for deadlock reports.
  std::string describe_wait() const;

  // --- For instructions ---
  template <typename T>
  T* lanes(Slot slot) {
    return reinterpret_cast<T*>(registers_ + slot);
  }
  uint32_t& predicate(Slot slot) { return *lanes<uint32_t>(slot); }
  const Slot* list(const Op& op) const;
  const Slot* touched(const Op& op) const;
  uint64_t address(const Address& at, int lane) {
    const uint64_t base =
        at.bytes == 8 ? lanes<uint64_t>(at.slot)[lane] : uint64_t{lanes<uint32_t>(at.slot)[lane]};
    return base + static_cast<uint64_t>(at.offset);
  }
  uint64_t address(const Op& op, int lane) { return address(op.at, lane); }

  // Each checks an access and returns where the bytes are; an update is an atomic operation.
  const std::byte* read(const Op& op, uint64_t address, uint32_t bytes, int lane);
  std::byte* write(const Op& op, uint64_t address, uint32_t bytes, int lane);
  std::byte* update(const Op& op, uint64_t address, uint32_t bytes, int lane);

  // Checked memory at an address: it lies in an allocation and is a multiple of `alignment`.
  struct Place {
    Region* region;
    uint64_t offset;
    Cta* cta;           // the CTA whose shared memory it is, or null
    uint8_t alias = 0;  // which of the memory's addresses was used
  };
  Place place(uint64_t address, uint64_t bytes, uint64_t alignment, int lane,
              bool reaches_cluster = true);
  Origin origin(int lane) const;
  // Records the last address polled, for deadlock reports.
  void note_poll(uint64_t address);

  // Ends its fragments' wait at a barrier of the CTA.
  void leave_barrier(uint32_t id, const Barrier& barrier);

  [[noreturn]] void fail(MachineError::Kind kind, const std::string& what,
                         int lane = -1) const override;

  Launch& launch;
  Cta& cta;
  const int index;
  uint64_t wake_at = 0;  // in nanoseconds; it sleeps until then
  AsyncGroups& bulk_groups(int lane) { return bulk_groups_[static_cast<size_t>(lane)]; }
  CopyGroups& copies() { return *copies_; }
  Products& products() { return *products_; }

  // For barrier.cluster: the lanes that have arrived but not yet waited, and the phase that each of
  // them waits for.
  uint32_t cluster_arrived = 0;
  std::array<uint64_t, kLanes> cluster_phases{};
  uint32_t registers_per_thread = 0;  // set by setmaxnreg

 private:
  Cta& cta_at(uint64_t offset, int lane, bool reaches_cluster) const;
  Place local_place(uint64_t offset, uint64_t bytes, int lane);
  Place place_of_access(const Op& op, uint64_t address, uint32_t bytes, int lane);
  void fill_constants();
  uint64_t special(const std::string& name, int lane) const;

  bool is_ready(const Fragment& fragment);
  // Returns the fragment that runs next, or null.
  Fragment* choose();
  // Runs an instruction. Returns false if others should get a turn. May change the fragment.
  bool step(Fragment*& fragment);
  void merge_at(Fragment*& fragment);
  void remove(Fragment* victim, Fragment*& fragment);
  void branch(Fragment& fragment, const Op& op, uint32_t taken);
  // Lets the lanes that the guard excludes continue separately.
  void split_off(Fragment& fragment, uint32_t lanes);
  // Whether all lanes that must run an instruction together are there.
  bool meets(Fragment& fragment, const Op& op);
  bool meets_elsewhere(const Op& op, uint32_t members);
  void arrive(Fragment& fragment, const Op& op);
  void exit(Fragment*& fragment, uint32_t mask);
  [[noreturn]] void fail_stuck() const;

  std::unique_ptr<Region> local_;  // of all lanes, contiguous by lane; null if there is none
  std::unique_ptr<std::byte[]> memory_;
  std::byte* registers_;
  std::vector<Fragment> fragments_;
  uint32_t current_pc_ = 0;
  std::array<AsyncGroups, kLanes> bulk_groups_;  // by lane
  std::unique_ptr<CopyGroups> copies_;
  std::unique_ptr<Products> products_;
  bool in_any_order_ = false;  // this quantum sticks to one fragment, wherever it is
  uint64_t polled_ = 0;        // address of the last strong read
  uint32_t polled_pc_ = 0;     // the instruction of that read
};

}  // namespace axonn::gpu_machine
