// A CUDA runtime in place of libcudart. Programs that are linked with it run their kernels' PTX on
// the machine; their host code is the real one. The functions of CUDA's headers are in api_*.cpp.
//
// The host goes on while the machine runs: each call gives the machine a number of turns that the
// adversary draws, and calls that wait give it as many as it takes. Several threads may call; a
// call has the runtime for itself, except while it waits.
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

// A point in a stream's work, which others wait for.
struct Signal {
  bool is_done = false;
  uint64_t at_ns = 0;  // when it was
  Clock clock;         // of what came before it
};
using SignalPtr = std::shared_ptr<Signal>;

// How long a thread pauses that has nothing to do: longer each time, because what it waits for is
// often done by other processes, which need the cores.
class Pause {
 public:
  std::chrono::microseconds next() { return std::exchange(now_, std::min(2 * now_, kLongest)); }

 private:
  static constexpr std::chrono::microseconds kLongest{1000};
  std::chrono::microseconds now_{50};
};

}  // namespace axonn::gpu_machine

// What CUDA's headers only declare.
struct CUgraph_st {
  std::vector<axonn::gpu_machine::Node> nodes;
};

namespace axonn::gpu_machine {

// A capture that is under way or over.
struct Capture {
  uint64_t id = 0;
  cudaStream_t origin = nullptr;
  cudaStreamCaptureMode mode{};
  std::thread::id thread;  // that began it
  bool is_active = true, is_broken = false;
  std::vector<Node> nodes;
  std::unique_ptr<CUgraph_st> graph;  // that will have them
};
using CapturePtr = std::shared_ptr<Capture>;

// How the branches of graphs run. CUDA promises neither, and a driver with few hardware queues
// (CUDA_DEVICE_MAX_CONNECTIONS=1) may let a node wait for another branch's.
enum class Branches { kSideBySide, kOneAfterTheOther };

// What comes of a stream's write of a value (cuStreamWriteValue32) to memory of another device.
// NVIDIA says that CUDA does not support it since 13.1; what a driver then does depends on it.
enum class RemoteWrites {
  kWork,
  kRefused,  // by the call, with CUDA_ERROR_INVALID_VALUE
  kIgnored,  // the call succeeds, and nothing is ever written
};

struct RuntimeOptions {
  Options machine{};
  int devices = 2;
  uint32_t most_turns = 64;  // of the machine in a call that does not wait
  Branches branches = Branches::kSideBySide;
  // In which order nodes run one after the other; empty: one that the adversary draws.
  NodeOrder node_order;
  RemoteWrites remote_writes = RemoteWrites::kWork;
  // How long a call waits, when the machine can do nothing, for other threads of the host to call.
  // After that it is a deadlock. A test whose host has one thread leaves it at 0.
  std::chrono::duration<double> patience{0};
  // Whether the host reads and writes devices' memory at its addresses, as it does pinned memory.
  bool host_reaches_devices = false;
  Capability capability;                       // of every device
  int driver_version = 13000;                  // as cudaDriverGetVersion tells it: CUDA 13.0
  uint64_t device_bytes = uint64_t{64} << 30;  // of memory on each device
  // Files of PTX that kernels are looked up in, by their names; empty: in the fat binaries.
  std::string ptx_folder;
  // A folder in memory where NCCL's ranks in several processes meet; empty: all are in this one.
  std::string wire_folder;
  // Finds functions of the driver that the machine itself does not offer by name.
  std::function<void*(const std::string& name)> other_entry_points;
};

class Runtime;
// Has the runtime for itself. Calls of the same thread do not nest.
class RuntimeLock {
 public:
  explicit RuntimeLock(Runtime& runtime);
  ~RuntimeLock();
  RuntimeLock(const RuntimeLock&) = delete;
  RuntimeLock& operator=(const RuntimeLock&) = delete;

 private:
  Runtime& runtime_;
};

// One process's runtime. It is the one that CUDA's functions use as long as it lives, for these are
// functions of C and have no other way to it; there is one at a time.
class Runtime {
 public:
  explicit Runtime(const RuntimeOptions& options = {});
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  static Runtime& current();
  // What makes the runtime of a process at its first call, if no test has made one.
  static void make_by(Runtime* (*maker)());

  // Makes the call of this function that comes after `skipped` more do nothing but return an error.
  // Behind cudaErrorECCUncorrectable the machine does nothing any more, and all calls fail.
  void fail(const std::string& function, cudaError_t error, int skipped = 0);
  // Gives programs a function of the driver, which they ask for by name, in place of the machine's.
  void offer_entry_point(const std::string& name, void* function) {
    entry_points_[name] = function;
  }
  void* entry_point(const std::string& name) const {
    const auto found = entry_points_.find(name);
    if (found != entry_points_.end()) return found->second;
    return options.other_entry_points ? options.other_entry_points(name) : nullptr;
  }
  // What ended the machine; afterwards every call fails, as after an error of a kernel on a GPU.
  const std::optional<MachineError>& failure() const { return failure_; }
  int calls_of(const std::string& function) const;
  // How often each function was called so far.
  const std::map<std::string, int>& calls() const { return calls_; }
  // Lets the machine run while the host does something else.
  void give_turns(int count);
  // Gives it turns as long as it can go on and no call waits.
  // Returns whether it went on.
  bool run_while_alone();

  Machine machine;
  const RuntimeOptions options;

  // --- For the functions of CUDA ---

  // Counts a call, and returns the error that a test injects into it, or 0.
  int count_call(const char* function);
  // Begins a call. An error is what the call must return at once.
  cudaError_t enter(const char* function);
  void give_some_turns() { give_turns(static_cast<int>(random_() % (options.most_turns + 1))); }
  // Ends a call: remembers its error for cudaGetLastError.
  cudaError_t leave(cudaError_t status);
  cudaError_t take_last_error(bool forget);

  // The stream of the machine behind a handle, which is null for a device's default stream.
  cudaStream_t resolve(cudaStream_t stream);
  // Enqueues work on a stream, or adds it to the graph that captures the stream.
  cudaError_t submit(cudaStream_t stream, std::function<void(int stream)> enqueue,
                     Node::Kind kind = Node::Kind::kWork);
  // Runs the machine until all of a stream is over, and notes what the host then knows.
  cudaError_t wait_for_stream(cudaStream_t stream);
  // Runs the machine until this is so, for a call that blocks the host. If it cannot come to that,
  // the machine ends with a deadlock that `what` describes.
  cudaError_t wait_until(const std::function<bool()>& is_so, const std::string& what);
  // Ends the machine with an error that no kernel made.
  cudaError_t end(const MachineError& error);
  cudaError_t wait_for_signal(const Signal& signal);
  cudaError_t wait_for_device(int device);

  // Enqueues a signal after what a stream of the machine has been given so far.
  SignalPtr signal_on(int stream);
  // Lets its device, and the default stream if it blocks, wait for a stream that is destroyed.
  void keep_waiting_for(const CUstream_st& stream);
  void wait_on(int stream, const SignalPtr& signal, const std::string& what);

  // What no capture allows, such as to wait for the host, breaks the stream's capture, or any that
  // is global or of the thread.
  cudaError_t refuse_in_capture(cudaStream_t stream);
  cudaError_t refuse_in_global_capture();

  // Finds the PTX kernel of a host function or of a module's handle, and loads its module. Null if
  // it is no kernel, or has no PTX, which why_not() then says.
  std::shared_ptr<const Program> kernel_of(const void* host_function);
  // CUDA loads a kernel when it is first launched or asked for, and may wait for all that runs.
  cudaError_t load_on_device(const void* host_function, bool is_launch);
  // Of the last call that asked for what the machine does not have.
  const std::string& why_not() const { return why_not_; }
  std::map<const void*, int>& shared_limits() { return shared_limits_; }
  // The kernels of modules that a program has loaded itself, by their handles.
  std::map<const void*, std::shared_ptr<const Program>>& kernels_of_modules() {
    return kernels_of_modules_;
  }
  // Another kernel may have this handle next.
  void forget_kernel(const void* handle);
  Mappings& mappings() { return mappings_; }

  // What CUDA keeps for each thread: the current device, and which calls captures forbid.
  inline static thread_local int device = 0;
  inline static thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
  // What threads of a library do behind a call's back; returns whether there was something to do.
  std::function<bool()> background;
  std::shared_ptr<void> nccl;  // what nccl/ keeps
  uint64_t next_capture = 1;
  std::vector<cudaStream_t> streams;  // all but the default ones, as they were made
  std::set<CapturePtr> captures;      // that are under way
  // Copies of the host's pageable memory, and the streams of the machine that read them.
  std::vector<std::pair<uint64_t, int>> staged;
  std::map<int, uint64_t> allocated_bytes;  // by device

 private:
  friend class RuntimeLock;
  void load_module_of(const std::string& kernel, const void* fat_binary);
  bool run_once();
  void let_others_call(std::chrono::microseconds pause);
  void order_with_default_stream(cudaStream_t stream);
  // By device, the machine's numbers of streams that are gone, whose work may not be over.
  std::map<int, std::vector<int>> destroyed_streams_;

  std::vector<std::unique_ptr<CUstream_st>> default_streams_;
  std::mt19937_64 random_;
  inline static thread_local cudaError_t last_error_ = cudaSuccess;
  std::mutex mutex_;
  std::atomic<int> waiting_ = 0;  // threads for the mutex
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
  std::set<std::pair<const void*, int>> loaded_functions_;  // and devices
  std::map<const void*, std::shared_ptr<const Program>> kernels_of_modules_;
  std::map<const void*, int> shared_limits_;  // dynamic shared memory, by function
  Mappings mappings_;
};

}  // namespace axonn::gpu_machine

// Likewise.
struct CUstream_st {
  int device = 0;
  int stream = 0;  // of the machine
  unsigned flags = 0;
  int priority = 0;
  bool is_default = false;
  axonn::gpu_machine::CapturePtr capture;  // null unless it is captured
  std::vector<size_t> tips;                // the nodes that the next one comes after
};

struct CUevent_st {
  unsigned flags = 0;
  int device = 0;
  axonn::gpu_machine::SignalPtr last;  // null if it was never recorded outside a capture
  axonn::gpu_machine::CapturePtr capture;
  std::vector<size_t> tips;  // where it was recorded in the capture
};

struct CUgraphExec_st {
  std::vector<axonn::gpu_machine::Node> nodes;
  std::vector<int> streams;                // of the machine, one for each node
  axonn::gpu_machine::SignalPtr replayed;  // the replay before
};
