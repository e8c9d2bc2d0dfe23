// The runtime of a process that was not written for it. The first CUDA call creates it as the
// environment says; it is never destroyed, because destructors at exit still call CUDA.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu_machine/runtime/runtime.h"

namespace axonn::gpu_machine {
namespace {

uint64_t number(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Returns the value that a variable names, or the first if it is not set; otherwise aborts.
template <typename Value>
Value one_of(const char* variable, const std::vector<std::pair<std::string, Value>>& values) {
  const char* text = std::getenv(variable);
  if (text == nullptr) return values.front().second;
  std::string names;
  for (const auto& [name, value] : values) {
    if (name == text) return value;
    names += " " + name;
  }
  std::fprintf(stderr, "the GPU in software: %s is one of%s, got %s\n", variable, names.c_str(),
               text);
  std::abort();
}

// Whether branches of graphs run side by side and, if not, in which order.
struct BranchesOfGraphs {
  Branches branches = Branches::kOneAfterTheOther;
  NodeOrder order;
};

// The folder of this library, which also holds the PTX and PyTorch's operators.
std::filesystem::path folder() {
  Dl_info info{};
  dladdr(reinterpret_cast<const void*>(&number), &info);
  return std::filesystem::path(info.dli_fname).parent_path();
}

// Lets the machine run while the host is busy or waits for another process.
class Engine {
 public:
  explicit Engine(Runtime& runtime) : thread_([this, &runtime] { run(runtime); }) {}
  void stop() {
    stops_ = true;
    thread_.join();
  }

 private:
  void run(Runtime& runtime) {
    Pause pause;
    while (!stops_) {
      std::this_thread::sleep_for(pause.next());
      const RuntimeLock lock(runtime);
      if (runtime.run_while_alone()) pause = {};
    }
  }

  std::atomic<bool> stops_ = false;
  std::thread thread_;
};

Engine*& engine() {
  static Engine* of_process = nullptr;
  return of_process;
}

// GPU_MACHINE_FAIL is RANK:FUNCTION:ERROR:SKIPPED, with the arguments of Runtime::fail.
void inject_error(Runtime& runtime) {
  const char* text = std::getenv("GPU_MACHINE_FAIL");
  if (text == nullptr) return;
  std::istringstream fields(text);
  std::string rank, function, error, skipped;
  std::getline(std::getline(std::getline(fields, rank, ':'), function, ':'), error, ':');
  std::getline(fields, skipped);
  const char* own = std::getenv("RANK");
  if (own == nullptr || rank != own) return;
  runtime.fail(function, static_cast<cudaError_t>(std::stoi(error)), std::stoi(skipped));
}

Runtime* make() {
  RuntimeOptions options;
  options.devices = static_cast<int>(number("GPU_MACHINE_DEVICES", 2));
  options.capability = capability_of(static_cast<int>(number("GPU_MACHINE_SM", 90)));
  options.driver_version = static_cast<int>(number("GPU_MACHINE_DRIVER", 13000));
  options.device_bytes = number("GPU_MACHINE_BYTES", uint64_t{4} << 30);
  options.machine.seed = number("GPU_MACHINE_SEED", 0);
  options.machine.sms = static_cast<int>(number("GPU_MACHINE_SMS", 32));
  options.machine.resident_ctas = 2 * options.machine.sms;
  options.machine.sleeps_for_real = true;
  options.machine.patience = std::numeric_limits<uint64_t>::max();
  options.patience = std::chrono::seconds(number("GPU_MACHINE_PATIENCE", 60));
  options.host_reaches_devices = true;
  options.remote_writes =
      one_of<RemoteWrites>("GPU_MACHINE_REMOTE_WRITES", {{"work", RemoteWrites::kWork},
                                                         {"refused", RemoteWrites::kRefused},
                                                         {"ignored", RemoteWrites::kIgnored}});
  const auto graphs = one_of<BranchesOfGraphs>("GPU_MACHINE_BRANCHES",
                                               {{"side-by-side", {Branches::kSideBySide, {}}},
                                                {"any-order", {}},
                                                {"kernels-first", {.order = &kernels_first}},
                                                {"kernels-last", {.order = &kernels_last}}});
  options.branches = graphs.branches;
  options.node_order = graphs.order;
  options.ptx_folder = folder() / "ptx";
  options.other_entry_points = [](const std::string& name) {
    void* const found = dlsym(RTLD_DEFAULT, name.c_str());
    if (found == nullptr) std::fprintf(stderr, "the GPU in software has no %s\n", name.c_str());
    return found;
  };
  const std::string operators = folder() / "libmachine_operators.so";
  if (dlopen(operators.c_str(), RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "the GPU in software: %s\n", dlerror());
    std::abort();
  }
  const char* wire = std::getenv("GPU_MACHINE_WIRE");
  options.wire_folder = wire == nullptr ? "" : wire;
  auto* runtime = new Runtime(options);
  inject_error(*runtime);
  engine() = new Engine(*runtime);
  std::atexit([] { engine()->stop(); });  // what it runs is destroyed later
  return runtime;
}

const bool is_set = (Runtime::make_by(&make), true);

}  // namespace
}  // namespace axonn::gpu_machine

// Called by tests through ctypes.
extern "C" void gpu_machine_fail(const char* function, int error, int skipped) {
  auto& runtime = axonn::gpu_machine::Runtime::current();
  const axonn::gpu_machine::RuntimeLock lock(runtime);
  runtime.fail(function, static_cast<cudaError_t>(error), skipped);
}
extern "C" int gpu_machine_calls(const char* function) {
  auto& runtime = axonn::gpu_machine::Runtime::current();
  const axonn::gpu_machine::RuntimeLock lock(runtime);
  return runtime.calls_of(function);
}
