// Several GPUs that run PTX: streams, kernels and copies. An adversary, drawn from a seed, runs a
// little of them at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "gpu_machine/async.h"
#include "gpu_machine/cta.h"
#include "gpu_machine/memory.h"
#include "gpu_machine/program.h"
#include "gpu_machine/residency.h"
#include "gpu_machine/warp.h"

namespace axonn::gpu_machine {

struct Options {
  uint64_t seed = 0;
  int resident_ctas = 16;         // per device at a time, of any size; the others wait
  int sms = 8;                    // per device; residency.h says what fits
  uint64_t patience = 4'000'000;  // a deadlock after this many warp instructions without a write
  bool checks_races = true;
  // While all warps sleep, time passes as on the host: they may wait for another process.
  bool sleeps_for_real = false;
};

// Work that a stream runs in order.
struct Launch {
  std::shared_ptr<const Program> program;
  Dim grid, block, cluster;  // the last one in CTAs
  uint64_t dynamic_shared_bytes = 0;
  Footprint footprint;          // of one CTA
  bool is_cooperative = false;  // all CTAs must be resident together
  std::unique_ptr<Region> params;
  uint64_t next_cluster = 0;
  std::vector<uint32_t> order;  // the order in which clusters start
  Identities identities;
  std::vector<std::unique_ptr<Cluster>> clusters;
  uint32_t id = 0;
  int device = 0;
  // It may begin before the previous kernel ends. It then starts with the clock `before`;
  // griddepcontrol.wait shows it `prior`, which covers everything ahead of it in the stream.
  bool overlaps = false;
  Clock before, after, prior;
};
struct Copy {
  uint64_t target = 0, source = 0, bytes = 0;
  uint32_t launch = 0;
  std::unique_ptr<Agent> engine;
  std::vector<std::pair<uint64_t, uint64_t>> pieces;  // begin and end of those not yet copied
  int fill = -1;               // if not negative, a byte to write everywhere, in place of a source
  uint32_t turns_a_piece = 0;  // average number of turns; drawn when it begins
};
// Any other work of a stream, a part of it per attempt. What it learns goes into its agent's
// clock.
enum class Progress { kWaits, kWent, kDone };
struct Task {
  std::function<std::string()> describe;  // for deadlock reports
  std::function<Progress(Agent&)> attempt;
  bool only_orders = false;  // it reads and writes nothing
  uint32_t launch = 0;
  std::unique_ptr<Agent> agent;
};

class Machine {
 public:
  explicit Machine(const Options& options = {});

  // Adds the kernels and variables of a PTX text.
  void load(std::string_view ptx);
  // Returns the kernels of a PTX text by name, and leaves other kernels of the same names alone.
  std::map<std::string, std::shared_ptr<const Program>> load_apart(std::string_view ptx);
  // Adds the kernels and variables of a module, which must outlive the machine. A kernel is decoded
  // when kernel_named first asks for it.
  void load(const Module& module);
  void load(Module&& module) = delete;
  // Returns the only kernel whose name contains this; in modules it finds only kernels that
  // kernel_named has returned. Throws std::invalid_argument if there is not exactly one.
  std::shared_ptr<const Program> kernel(std::string_view part_of_name) const;

  // Returns the kernel with exactly this name, or null.
  std::shared_ptr<const Program> kernel_named(const std::string& name);

  Memory& memory() { return memory_; }
  // Allocates memory with these values.
  template <typename T>
  uint64_t put(const std::vector<T>& values, const std::string& name) {
    const uint64_t address = memory_.allocate(values.size() * sizeof(T), name);
    memory_.write(address, values.data(), values.size() * sizeof(T));
    return address;
  }
  template <typename T>
  std::vector<T> get(uint64_t address, size_t count) {
    std::vector<T> values(count);
    memory_.read(address, values.data(), count * sizeof(T));
    return values;
  }

  int new_stream(int device);
  // Enqueues a kernel. The sizes of the arguments must be those of its parameters.
  template <typename... Args>
  void launch(int stream, const std::shared_ptr<const Program>& program, Dim grid, Dim block,
              const Args&... args) {
    std::vector<std::vector<std::byte>> values;
    (values.push_back(bytes_of(args)), ...);
    enqueue(stream, program, grid, block, values, 0, program->cluster);
  }
  void enqueue(int stream, const std::shared_ptr<const Program>& program, Dim grid, Dim block,
               const std::vector<std::vector<std::byte>>& args, uint64_t dynamic_shared_bytes,
               Dim cluster = {}, bool is_cooperative = false, bool overlaps = false);
  // Enqueues a copy by a copy engine, in several pieces and in any order. A copy of up to 8 bytes
  // is one piece, and a release to the whole system.
  void copy(int stream, uint64_t target, uint64_t source, uint64_t bytes);
  // Enqueues a fill: a copy engine writes one byte everywhere.
  void fill(int stream, uint64_t target, int value, uint64_t bytes);
  void enqueue_task(int stream, std::function<std::string()> describe,
                    std::function<Progress(Agent&)> attempt);
  // Enqueues a task that takes no time once it is possible: `attempt` is called until it is true.
  void enqueue_task(int stream, std::string what, std::function<bool(Agent&)> attempt);
  // The same for a task that reads and writes nothing, but orders other work.
  void enqueue_order(int stream, std::string what, std::function<bool(Agent&)> attempt);

  // Reserves room for CTAs, for a task that needs SMs: all, or none and returns false.
  bool take_ctas(int device, int count);
  void give_ctas(int device, int count) { resident_[device] -= count; }

  // Runs until all enqueued work has ended. Throws MachineError.
  void run();

  // For a host that continues while the machine runs. Work that the host enqueues is ordered after
  // everything its clock has seen.
  enum class Turn { kDone, kWent, kStuck };
  // Runs a little of the work. Stuck means that it waits for work that is not enqueued yet.
  Turn turn();
  bool is_idle(int stream) const { return streams_.at(static_cast<size_t>(stream)).queue.empty(); }
  Clock& host_clock() { return host_clock_; }
  const Clock& clock_of(int stream) const { return streams_.at(static_cast<size_t>(stream)).clock; }
  // Reports that what the host waits for can never happen.
  [[noreturn]] void fail_deadlock(const std::string& why);
  // Forgets everything that has ended, if the host has seen all of it.
  void forget_the_past();

  uint64_t warp_instructions() const { return instructions_; }
  uint64_t now_ns() const { return now_ns_; }

  // Lets a device access another's memory. Returns false if it already could.
  bool enable_peer(int device, int peer) { return peers_.emplace(device, peer).second; }

  // --- For warps ---
  bool may_reach(int device, const Region& region) const {
    return region.device < 0 || region.device == device || peers_.contains({device, region.device});
  }
  const Options& options() const { return options_; }
  const Actor& actor(uint32_t id) const { return actors_[id]; }
  bool is_of_this_run(uint32_t actor) const { return actor >= first_actor_; }
  const Actor& new_actor(Actor actor);  // assigns a new id
  AsyncQueue& async() { return async_; }
  // Ends the launch if none of it is left.
  void note_end(const Launch& launch);
  Region* region_at(uint64_t address) { return memory_.find(address); }
  void note_change() { last_change_ = instructions_; }
  // Clock of everything released to other processes so far. Their answers come after it.
  Clock& told_to_others() { return told_to_others_; }
  uint32_t draw(uint32_t below) { return static_cast<uint32_t>(random_() % below); }

 private:
  void add_variables(const Module& module);
  struct Work {
    std::unique_ptr<Launch> launch;
    std::unique_ptr<Copy> copy;
    std::unique_ptr<Task> task;
    Clock before;  // what the host had seen
  };
  struct Stream {
    int device;
    std::deque<Work> queue;
    bool has_begun = false;   // the first item of the queue
    uint32_t last_ended = 0;  // the launch before that one
    Clock clock;
    std::optional<Clock> before_last;  // the clock before the last work, if that was a kernel
  };

  template <typename T>
  static std::vector<std::byte> bytes_of(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<std::byte> bytes(sizeof(T));
    std::memcpy(bytes.data(), &value, sizeof(T));
    return bytes;
  }

  void begin_work(Stream& stream);
  void end_work(Stream& stream);
  void note_end_of(uint32_t launch, Clock& clock);
  void push(int stream, Work work);
  void start_ctas();
  void start_cluster(Launch& launch, const std::vector<int>& sms);
  Residency& residency(int device) {
    return residency_.try_emplace(device, options_.sms).first->second;
  }
  std::unique_ptr<Cta> make_cta(Launch& launch, Dim index, Cluster& cluster);
  bool step_tasks();
  bool step_copies();
  void step_copy(Stream& stream);
  bool step_warps();
  Warp* choose_warp();
  bool sleep_until(uint64_t wake_at_ns);
  void retire(Warp& warp);
  void leave(Cta& cta, const Warp& last);
  void check_is_last(const Cta& cta, const Warp& last) const;

  Options options_;
  Memory memory_;
  Symbols symbols_;
  std::map<std::string, std::shared_ptr<const Program>> programs_;
  struct Undecoded {
    const Module* module;
    const Function* kernel;
    std::shared_ptr<const Symbols> symbols;  // as of when the module was loaded
  };
  std::map<std::string, Undecoded> undecoded_;
  std::deque<Stream> streams_;
  Clock host_clock_, told_to_others_;
  std::vector<Actor> actors_;
  uint32_t first_actor_ = 1;
  uint32_t launches_ = 0;
  int64_t ctas_ = 0;
  std::map<int, int> resident_;  // CTAs by device
  std::map<int, Residency> residency_;
  std::set<std::pair<int, int>> peers_;  // devices that reach another's memory
  std::vector<Warp*> live_;
  uint64_t instructions_ = 0, last_change_ = 0, now_ns_ = 1;
  uint32_t starved_ = 0;  // which warps get fewer turns
  std::mt19937_64 random_;
  std::optional<std::chrono::steady_clock::time_point> asleep_since_;  // since all warps sleep
  uint64_t asleep_at_ns_ = 0;                                          // the time then
  AsyncQueue async_{*this};
};

}  // namespace axonn::gpu_machine
