// The runtime of a process that was not written for it: made at its first call of CUDA, of what the
// environment says, and never destroyed, because destructors at its end still call CUDA.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <string>
#include <thread>

#include "gpu_machine/runtime/runtime.h"

namespace axonn::gpu_machine {
namespace {

uint64_t number(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Where this library lies, and beside it the PTX and PyTorch's operators.
std::filesystem::path folder() {
  Dl_info info{};
  dladdr(reinterpret_cast<const void*>(&number), &info);
  return std::filesystem::path(info.dli_fname).parent_path();
}

// Lets the machine run while the host does something else, or waits for another process.
class Engine {
 public:
  explicit Engine(Runtime& runtime) : thread_([this, &runtime] { run(runtime); }) {}
  void stop() {
    stops_ = true;
    thread_.join();
  }

 private:
  void run(Runtime& runtime) {
    constexpr std::chrono::microseconds kPause{200};
    while (!stops_) {
      std::this_thread::sleep_for(kPause);
      const RuntimeLock lock(runtime);
      runtime.run_while_alone();
    }
  }

  std::atomic<bool> stops_ = false;
  std::thread thread_;
};

Engine*& engine() {
  static Engine* of_process = nullptr;
  return of_process;
}

Runtime* make() {
  RuntimeOptions options;
  options.devices = static_cast<int>(number("GPU_MACHINE_DEVICES", 2));
  options.device_bytes = number("GPU_MACHINE_BYTES", uint64_t{4} << 30);
  options.machine.seed = number("GPU_MACHINE_SEED", 0);
  options.machine.sleeps_for_real = true;
  options.machine.patience = std::numeric_limits<uint64_t>::max();
  options.patience = std::chrono::seconds(number("GPU_MACHINE_PATIENCE", 60));
  options.host_reaches_devices = true;
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
  engine() = new Engine(*runtime);
  std::atexit([] { engine()->stop(); });  // what it runs is destroyed later
  return runtime;
}

const bool is_set = (Runtime::make_by(&make), true);

}  // namespace
}  // namespace axonn::gpu_machine
