// A warp: 32 lanes with registers of their own, which may be at different instructions.
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

// A kernel's name for messages: the middle of a long one is left out.
std::string short_name(const std::string& name);

// Where an instruction was issued, for messages.
struct Origin {
  const Launch& launch;
  Dim cta;
  int warp;
  int lane;  // -1 for all of the warp
  uint32_t pc;

  std::string describe() const;
};

// Lanes that are at the same instruction. The lanes of a warp that have not exited are divided into
// fragments, and two that are ready at the same instruction become one.
struct Fragment {
  // kWaiting: until its instruction is ready.
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

  // Runs at most so many instructions. Returns how many it ran: fewer if it must wait.
  int run(int quantum);
  bool has_exited() const { return fragments_.empty(); }
  // Whether no fragment can go on before something outside the warp happens.
  bool is_blocked();
  uint32_t live_lanes() const;
  // "waits at barrier 1", "polls flag + 128": for reports of deadlocks.
  std::string describe_wait() const;

  // --- For the instructions ---
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

  // Each checks an access and returns where its bytes are; an update is an atomic operation.
  const std::byte* read(const Op& op, uint64_t address, uint32_t bytes, int lane);
  std::byte* write(const Op& op, uint64_t address, uint32_t bytes, int lane);
  std::byte* update(const Op& op, uint64_t address, uint32_t bytes, int lane);

  // Memory at an address, checked: that it lies in an allocation, and is a multiple of `alignment`.
  struct Place {
    Region* region;
    uint64_t offset;
    Cta* cta;           // whose shared memory it is; null for other memory
    uint8_t alias = 0;  // which of the memory's addresses was used
  };
  Place place(uint64_t address, uint64_t bytes, uint64_t alignment, int lane,
              bool reaches_cluster = true);
  Origin origin(int lane) const;
  // What it last waited for, for reports of deadlocks.
  void note_poll(uint64_t address);

  // Ends the wait of its fragments at a barrier of the CTA.
  void leave_barrier(uint32_t id, const Barrier& barrier);

  [[noreturn]] void fail(MachineError::Kind kind, const std::string& what,
                         int lane = -1) const override;

  Launch& launch;
  Cta& cta;
  const int index;
  uint64_t wake_at = 0;  // nanoseconds; it sleeps until then
  AsyncGroups& bulk_groups(int lane) { return bulk_groups_[static_cast<size_t>(lane)]; }
  CopyGroups& copies() { return *copies_; }
  Products& products() { return *products_; }

  // For barrier.cluster: the lanes that have arrived and not waited yet, and which phase each waits
  // for.
  uint32_t cluster_arrived = 0;
  std::array<uint64_t, kLanes> cluster_phases{};
  uint32_t registers_per_thread = 0;  // setmaxnreg

 private:
  Cta& cta_at(uint64_t offset, int lane, bool reaches_cluster) const;
  Place local_place(uint64_t offset, uint64_t bytes, int lane);
  Place place_of_access(const Op& op, uint64_t address, uint32_t bytes, int lane);
  void fill_constants();
  uint64_t special(const std::string& name, int lane) const;

  bool is_ready(const Fragment& fragment);
  // The fragment that runs next, or none.
  Fragment* choose();
  // Runs an instruction; false if others should have a turn. The fragment may change.
  bool step(Fragment*& fragment);
  void merge_at(Fragment*& fragment);
  void remove(Fragment* victim, Fragment*& fragment);
  void branch(Fragment& fragment, const Op& op, uint32_t taken);
  // Lets the lanes that the guard leaves out go on, apart from the others.
  void split_off(Fragment& fragment, uint32_t lanes);
  // Whether the lanes that run an instruction together are all there.
  bool meets(Fragment& fragment, const Op& op);
  bool meets_elsewhere(const Op& op, uint32_t members);
  void arrive(Fragment& fragment, const Op& op);
  void exit(Fragment*& fragment, uint32_t mask);
  [[noreturn]] void fail_stuck() const;

  std::unique_ptr<Region> local_;  // of all lanes, one behind the other; null if there is none
  std::unique_ptr<std::byte[]> memory_;
  std::byte* registers_;
  std::vector<Fragment> fragments_;
  uint32_t current_pc_ = 0;
  std::array<AsyncGroups, kLanes> bulk_groups_;  // by lane
  std::unique_ptr<CopyGroups> copies_;
  std::unique_ptr<Products> products_;
  bool in_any_order_ = false;  // this quantum keeps to a fragment that is not the hindmost
  uint64_t polled_ = 0;        // address of the last strong read
  uint32_t polled_pc_ = 0;     // its instruction
};

}  // namespace axonn::gpu_machine
