// A CUDA runtime that replaces libcudart. Programs linked with it run their kernels' PTX on the
// machine; their host code is real. The functions of CUDA's headers are in api_*.cpp.
//
// The host continues while the machine runs: each call gives the machine a number of turns that the
// adversary draws, and calls that wait give it as many as needed. Several threads may call; a call
// has the runtime to itself, except while it waits.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu_machine/machine.h"
#include "gpu_machine/runtime/capability.h"
#include "gpu_machine/runtime/driver_api.h"
#include "gpu_machine/runtime/graph_nodes.h"
#include "gpu_machine/runtime/mappings.h"

namespace axonn::gpu_machine {

// A point in a stream's work that others wait for.
struct Signal {
  bool is_done = false;
  uint64_t at_ns = 0;  // when it was reached
  Clock clock;         // of everything before it
};
using SignalPtr = std::shared_ptr<Signal>;

// How long a thread with nothing to do pauses: longer each time, because it often waits for other
// processes, which need the cores.
class Pause {
 public:
  std::chrono::microseconds next() { return std::exchange(now_, std::min(2 * now_, kLongest)); }

 private:
  static constexpr std::chrono::microseconds kLongest{1000};
  std::chrono::microseconds now_{50};
};

}  // namespace axonn::gpu_machine

// CUDA's headers only declare this.
struct CUgraph_st {
  std::vector<axonn::gpu_machine::Node> nodes;
};

namespace axonn::gpu_machine {

// A capture, active or ended.
struct Capture {
  uint64_t id = 0;
  cudaStream_t origin = nullptr;
  cudaStreamCaptureMode mode{};
  std::thread::id thread;  // the thread that began it
  bool is_active = true, is_broken = false;
  std::vector<Node> nodes;
  std::unique_ptr<CUgraph_st> graph;  // receives the nodes at the end
};
using CapturePtr = std::shared_ptr<Capture>;

// How the branches of graphs run. CUDA promises neither way, and a driver with few hardware queues
// (CUDA_DEVICE_MAX_CONNECTIONS=1) may let a node wait for a node of another branch.
enum class Branches { kSideBySide, kOneAfterTheOther };

// The effect of a stream's value write (cuStreamWriteValue32) to memory of another device. NVIDIA
// says that CUDA does not support it since 13.1; the effect then depends on the driver.
enum class RemoteWrites {
  kWork,
  kRefused,  // by the call, with CUDA_ERROR_INVALID_VALUE
  kIgnored,  // the call succeeds, and nothing is ever written
};

struct RuntimeOptions {
  Options machine{};
  int devices = 2;
  uint32_t most_turns = 64;  // of the machine, per call that does not wait
  Branches branches = Branches::kSideBySide;
  // The order of nodes that run one after the other; empty: the adversary draws one.
  NodeOrder node_order;
  RemoteWrites remote_writes = RemoteWrites::kWork;
  // How long a call waits for other host threads to call when the machine can do nothing. After
  // that it is a deadlock. Tests with a single host thread leave this at 0.
  std::chrono::duration<double> patience{0};
  // Whether the host accesses device memory at its addresses, as it does pinned memory.
  bool host_reaches_devices = false;
  Capability capability;                       // of every device
  int driver_version = 13000;                  // result of cudaDriverGetVersion: CUDA 13.0
  uint64_t device_bytes = uint64_t{64} << 30;  // of memory per device
  // Folder of PTX files to look up kernels in, by name; empty: use the fat binaries.
  std::string ptx_folder;
  // In-memory folder where NCCL ranks of several processes meet; empty: all are in this one.
  std::string wire_folder;
  // Finds functions of the driver that the machine does not offer by name.
  std::function<void*(const std::string& name)> other_entry_points;
};

class Runtime;
// Gives a call exclusive use of the runtime. Calls of one thread do not nest.
class RuntimeLock {
 public:
  explicit RuntimeLock(Runtime& runtime);
  ~RuntimeLock();
  RuntimeLock(const RuntimeLock&) = delete;
  RuntimeLock& operator=(const RuntimeLock&) = delete;

 private:
  Runtime& runtime_;
};

// The runtime of a process. CUDA's functions use it as long as it lives, because they are C
// functions and have no other way to it. There is one at a time.
class Runtime {
 public:
  explicit Runtime(const RuntimeOptions& options = {});
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  static Runtime& current();
  // Sets the function that makes a process's runtime at the first call, if no test has made one.
  static void make_by(Runtime* (*maker)());

  // Makes a later call of this function, after `skipped` more, do nothing but return an error.
  // After cudaErrorECCUncorrectable the machine does nothing more, and all calls fail.
  void fail(const std::string& function, cudaError_t error, int skipped = 0);
  // Replaces the machine's function of the driver that programs ask for by this name.
  void offer_entry_point(const std::string& name, void* function) {
    entry_points_[name] = function;
  }
  void* entry_point(const std::string& name) const {
    const auto found = entry_points_.find(name);
    if (found != entry_points_.end()) return found->second;
    return options.other_entry_points ? options.other_entry_points(name) : nullptr;
  }
  // The error that ended the machine; all later calls fail, as after a kernel error on a GPU.
  const std::optional<MachineError>& failure() const { return failure_; }
  int calls_of(const std::string& function) const;
  // How often each function has been called.
  const std::map<std::string, int>& calls() const { return calls_; }
  // Lets the machine run while the host does something else.
  void give_turns(int count);
  // Gives the machine turns as long as it can go on and no call waits. Returns whether it went
  // on.
  bool run_while_alone();

  Machine machine;
  const RuntimeOptions options;

  // --- For the functions of CUDA ---

  // Counts a call, and returns the error that a test injects into it, or 0.
  int count_call(const char* function);
  // Begins a call. If this returns an error, the call must return it at once.
  cudaError_t enter(const char* function);
  void give_some_turns() { give_turns(static_cast<int>(random_() % (options.most_turns + 1))); }
  // Ends a call: remembers its error for cudaGetLastError.
  cudaError_t leave(cudaError_t status);
  cudaError_t take_last_error(bool forget);

  // Returns the stream behind a handle; a null handle means the device's default stream.
  cudaStream_t resolve(cudaStream_t stream);
  // Enqueues work on a stream, or adds it to the graph that captures the stream.
  cudaError_t submit(cudaStream_t stream, std::function<void(int stream)> enqueue,
                     Node::Kind kind = Node::Kind::kWork);
  // Runs the machine until a stream's work has ended, and notes what the host then knows.
  cudaError_t wait_for_stream(cudaStream_t stream);
  // Runs the machine until `is_so` holds, for a call that blocks the host. If that can never
  // happen, the machine ends with a deadlock that `what` describes.
  cudaError_t wait_until(const std::function<bool()>& is_so, const std::string& what);
  // Ends the machine with an error that no kernel caused.
  cudaError_t end(const MachineError& error);
  cudaError_t wait_for_signal(const Signal& signal);
  cudaError_t wait_for_device(int device);

  // Enqueues a signal after all work that a stream of the machine has so far.
  SignalPtr signal_on(int stream);
  // Makes a stream's device, and the default stream if it blocks, wait for a destroyed stream.
  void keep_waiting_for(const CUstream_st& stream);
  void wait_on(int stream, const SignalPtr& signal, const std::string& what);

  // Refuses what captures do not allow, such as waiting for the host. This breaks the stream's
  // capture, or any that is global or of this thread.
  cudaError_t refuse_in_capture(cudaStream_t stream);
  cudaError_t refuse_in_global_capture();

  // Finds the PTX kernel of a host function or of a module's handle, and loads its module. Returns
  // null if there is no kernel or no PTX; why_not() then tells why.
  std::shared_ptr<const Program> kernel_of(const void* host_function);
  // CUDA loads a kernel when it is first launched or queried, and may wait for all running work.
  cudaError_t load_on_device(const void* host_function, bool is_launch);
  // Why the last request that the machine does not support was refused.
  const std::string& why_not() const { return why_not_; }
  std::map<const void*, int>& shared_limits() { return shared_limits_; }
  // The kernels of modules that a program has loaded itself, by handle.
  std::map<const void*, std::shared_ptr<const Program>>& kernels_of_modules() {
    return kernels_of_modules_;
  }
  // Forgets a kernel, since another one may get its handle.
  void forget_kernel(const void* handle);
  Mappings& mappings() { return mappings_; }

  // State that CUDA keeps per thread: the current device, and which calls captures forbid.
  inline static thread_local int device = 0;
  inline static thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
  // Work of a library's threads behind a call's back; returns whether there was any.
  std::function<bool()> background;
  std::shared_ptr<void> nccl;  // the state of nccl/
  uint64_t next_capture = 1;
  std::vector<cudaStream_t> streams;  // all but the default ones, in order of creation
  std::set<CapturePtr> captures;      // the active ones
  // Staged copies of pageable host memory, and the machine's streams that read them.
  std::vector<std::pair<uint64_t, int>> staged;
  std::map<int, uint64_t> allocated_bytes;  // by device

 private:
  friend class RuntimeLock;
  void load_module_of(const std::string& kernel, const void* fat_binary);
  bool run_once();
  void let_others_call(std::chrono::microseconds pause);
  void order_with_default_stream(cudaStream_t stream);
  // By device: machine streams of destroyed handles, whose work may not have ended.
  std::map<int, std::vector<int>> destroyed_streams_;

  std::vector<std::unique_ptr<CUstream_st>> default_streams_;
  std::mt19937_64 random_;
  inline static thread_local cudaError_t last_error_ = cudaSuccess;
  std::mutex mutex_;
  std::atomic<int> waiting_ = 0;  // threads waiting for the mutex
  std::optional<MachineError> failure_;
  struct Injected {
    cudaError_t error;
    int skipped;
  };
  std::map<std::string, Injected> injected_;
  std::map<std::string, int> calls_;
  std::map<std::string, void*> entry_points_ = driver_functions();
  std::set<std::string> loaded_files_;
  std::set<const void*> loaded_modules_;
  std::optional<std::map<std::string, std::string>> files_of_kernels_;
  std::string last_call_, why_not_;
  std::set<std::pair<const void*, int>> loaded_functions_;  // with devices
  std::map<const void*, std::shared_ptr<const Program>> kernels_of_modules_;
  std::map<const void*, int> shared_limits_;  // dynamic shared memory, by function
  Mappings mappings_;
};

}  // namespace axonn::gpu_machine

// CUDA's headers only declare these, too.
struct CUstream_st {
  int device = 0;
  int stream = 0;  // of the machine
  unsigned flags = 0;
  int priority = 0;
  bool is_default = false;
  axonn::gpu_machine::CapturePtr capture;  // null unless it is captured
  std::vector<size_t> tips;                // the nodes that the next one depends on
};

struct CUevent_st {
  unsigned flags = 0;
  int device = 0;
  axonn::gpu_machine::SignalPtr last;  // null if never recorded outside a capture
  axonn::gpu_machine::CapturePtr capture;
  std::vector<size_t> tips;  // where the capture recorded it
};

struct CUgraphExec_st {
  std::vector<axonn::gpu_machine::Node> nodes;
  std::vector<int> streams;                // of the machine, one per node
  axonn::gpu_machine::SignalPtr replayed;  // end of the previous replay
};
