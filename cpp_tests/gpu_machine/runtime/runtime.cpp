#include "gpu_machine/runtime/runtime.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "gpu_machine/runtime/fat_binary.h"
#include "gpu_machine/runtime/ptx_files.h"

namespace axonn::gpu_machine {
namespace {

Runtime*& current_runtime() {
  static Runtime* current = nullptr;
  return current;
}

Runtime* (*&maker_of_runtime())() {
  static Runtime* (*maker)() = nullptr;
  return maker;
}

cudaError_t error_of(MachineError::Kind kind) {
  switch (kind) {
    case MachineError::Kind::kTrap:
      return cudaErrorLaunchFailure;
    case MachineError::Kind::kMemory:
      return cudaErrorIllegalAddress;
    case MachineError::Kind::kGone:
      return cudaErrorECCUncorrectable;
    default:
      return cudaErrorUnknown;  // errors that no GPU notices
  }
}

}  // namespace

Runtime::Runtime(const RuntimeOptions& with)
    : machine(with.machine), options(with), random_(with.machine.seed) {
  if (current_runtime() != nullptr) throw std::logic_error("there is a runtime already");
  for (int d = 0; d < options.devices; ++d) {
    default_streams_.push_back(std::make_unique<CUstream_st>());
    default_streams_.back()->device = d;
    default_streams_.back()->stream = machine.new_stream(d);
    default_streams_.back()->is_default = true;
  }
  if (options.host_reaches_devices) machine.memory().let_host_reach_files();
  device = 0;
  capture_mode = cudaStreamCaptureModeGlobal;
  last_error_ = cudaSuccess;
  current_runtime() = this;
}

Runtime::~Runtime() {
  current_runtime() = nullptr;
  for (CUstream_st* stream : streams) delete stream;
}

Runtime& Runtime::current() {
  if (current_runtime() == nullptr && maker_of_runtime() != nullptr) {
    static Runtime* const of_process = maker_of_runtime()();  // never destroyed: see make_by
    return *of_process;
  }
  if (current_runtime() == nullptr) {
    // CUDA's functions cannot report this: an exception would end in destructors that call them.
    std::fputs("a function of CUDA was called without a Runtime\n", stderr);
    std::abort();
  }
  return *current_runtime();
}

void Runtime::make_by(Runtime* (*maker)()) { maker_of_runtime() = maker; }

void Runtime::fail(const std::string& function, cudaError_t error, int skipped) {
  injected_[function] = {error, skipped};
}

int Runtime::calls_of(const std::string& function) const {
  const auto found = calls_.find(function);
  return found == calls_.end() ? 0 : found->second;
}

int Runtime::count_call(const char* function) {
  ++calls_[function];
  last_call_ = function;
  const auto found = injected_.find(function);
  if (found == injected_.end() || found->second.skipped-- != 0) return 0;
  const cudaError_t error = found->second.error;
  injected_.erase(found);
  return error;
}

cudaError_t Runtime::enter(const char* function) {
  const int injected = count_call(function);
  if (failure_) return leave(error_of(failure_->kind()));
  if (injected == cudaErrorECCUncorrectable) {
    (void)end({MachineError::Kind::kGone, std::string(function) + ": the GPU is gone"});
  }
  if (injected != 0) return leave(static_cast<cudaError_t>(injected));
  give_some_turns();
  return failure_ ? leave(error_of(failure_->kind())) : cudaSuccess;
}

cudaError_t Runtime::leave(cudaError_t status) {
  if (status != cudaSuccess && status != cudaErrorNotReady) last_error_ = status;
  if (status == cudaErrorNotSupported) {
    why_not_ = last_call_ + ": the GPU in software does not support this use of it";
  }
  return status;
}

cudaError_t Runtime::take_last_error(bool forget) {
  if (failure_) return error_of(failure_->kind());
  return forget ? std::exchange(last_error_, cudaSuccess) : last_error_;
}

// Returns whether there is more to do that does not wait for the host.
bool Runtime::run_once() {
  if (failure_) return false;
  try {
    const bool did = background != nullptr && background();
    return machine.turn() == Machine::Turn::kWent || did;
  } catch (const MachineError& error) {
    failure_ = error;
    return false;
  }
}

void Runtime::give_turns(int count) {
  while (count-- > 0 && run_once()) {
  }
}

bool Runtime::run_while_alone() {
  bool went = false;
  while (waiting_ == 0 && run_once()) went = true;
  return went;
}

// --- Threads of the host ---

RuntimeLock::RuntimeLock(Runtime& runtime) : runtime_(runtime) {
  ++runtime_.waiting_;
  runtime_.mutex_.lock();
  --runtime_.waiting_;
}

RuntimeLock::~RuntimeLock() { runtime_.mutex_.unlock(); }

void Runtime::let_others_call(std::chrono::microseconds pause) {
  mutex_.unlock();
  std::this_thread::sleep_for(pause);
  mutex_.lock();
}

cudaError_t Runtime::wait_until(const std::function<bool()>& is_so, const std::string& what) {
  using Time = std::chrono::steady_clock;
  constexpr auto kNever = Time::time_point::max();
  constexpr int kTurnsBetweenPauses = 64;  // while others want to call
  auto stuck_since = kNever;
  Pause pause;
  int turns = 0;
  while (!failure_ && !is_so()) {
    if (run_once()) {
      stuck_since = kNever;
      pause = {};
      if (waiting_ != 0 && ++turns % kTurnsBetweenPauses == 0) let_others_call(pause.next());
      continue;
    }
    if (failure_ || is_so()) break;
    stuck_since = std::min(stuck_since, Time::now());
    if (Time::now() - stuck_since >= options.patience) {
      try {
        machine.fail_deadlock(what);
      } catch (const MachineError& error) {
        failure_ = error;
      }
      break;
    }
    let_others_call(pause.next());
  }
  return failure_ ? error_of(failure_->kind()) : cudaSuccess;
}

cudaError_t Runtime::end(const MachineError& error) {
  if (!failure_) failure_ = error;
  return error_of(failure_->kind());
}

// --- Streams ---

cudaStream_t Runtime::resolve(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) {
    return default_streams_[static_cast<size_t>(device)].get();
  }
  return std::find(streams.begin(), streams.end(), stream) == streams.end() ? nullptr : stream;
}

// The default stream, and the streams not created as non-blocking, wait for each other.
void Runtime::order_with_default_stream(cudaStream_t stream) {
  if (!stream->is_default) {
    if ((stream->flags & cudaStreamNonBlocking) != 0) return;
    const int other = default_streams_[static_cast<size_t>(stream->device)]->stream;
    wait_on(stream->stream, signal_on(other), "the default stream");
    return;
  }
  for (CUstream_st* other : streams) {
    if (other->device != stream->device || (other->flags & cudaStreamNonBlocking) != 0) continue;
    wait_on(stream->stream, signal_on(other->stream), "the blocking streams");
  }
}

cudaError_t Runtime::submit(cudaStream_t handle, std::function<void(int stream)> enqueue,
                            Node::Kind kind) {
  CUstream_st* stream = resolve(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (stream->capture != nullptr) {
    if (stream->capture->is_broken) return cudaErrorStreamCaptureInvalidated;
    auto& nodes = stream->capture->nodes;
    nodes.push_back({kind, stream->device, stream->tips, std::move(enqueue), nullptr});
    stream->tips = {nodes.size() - 1};
    return cudaSuccess;
  }
  if (stream->is_default) {
    for (const CapturePtr& capture : captures) {
      if ((capture->origin->flags & cudaStreamNonBlocking) == 0) {
        capture->is_broken = true;
        return cudaErrorStreamCaptureImplicit;
      }
    }
  }
  order_with_default_stream(stream);
  try {
    enqueue(stream->stream);
  } catch (const std::invalid_argument&) {
    return cudaErrorInvalidConfiguration;
  }
  return cudaSuccess;
}

void Runtime::keep_waiting_for(const CUstream_st& stream) {
  destroyed_streams_[stream.device].push_back(stream.stream);
  if ((stream.flags & cudaStreamNonBlocking) != 0) return;
  const int of_default = default_streams_[static_cast<size_t>(stream.device)]->stream;
  wait_on(of_default, signal_on(stream.stream), "a blocking stream that is gone");
}

SignalPtr Runtime::signal_on(int stream) {
  auto signal = std::make_shared<Signal>();
  machine.enqueue_order(stream, "a signal", [signal](Agent& agent) {
    signal->is_done = true;
    signal->at_ns = agent.machine.now_ns();
    signal->clock = agent.clock;
    return true;
  });
  return signal;
}

void Runtime::wait_on(int stream, const SignalPtr& signal, const std::string& what) {
  machine.enqueue_order(stream, "waits for " + what, [signal](Agent& agent) {
    if (signal->is_done) agent.clock.join(signal->clock);
    return signal->is_done;
  });
}

cudaError_t Runtime::wait_for_signal(const Signal& signal) {
  const cudaError_t status =
      wait_until([&] { return signal.is_done; }, "the host waits for what cannot happen");
  if (status != cudaSuccess) return status;
  machine.host_clock().join(signal.clock);
  return cudaSuccess;
}

cudaError_t Runtime::wait_for_stream(cudaStream_t handle) {
  CUstream_st* stream = resolve(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = refuse_in_capture(stream)) return error;
  order_with_default_stream(stream);
  const int of_machine = stream->stream;  // another thread may destroy the handle meanwhile
  const SignalPtr end = signal_on(of_machine);
  const cudaError_t status = wait_for_signal(*end);
  if (status == cudaSuccess) {
    machine.host_clock().join(machine.clock_of(of_machine));
    machine.forget_the_past();
  }
  return status;
}

cudaError_t Runtime::wait_for_device(int which) {
  if (const cudaError_t error = refuse_in_global_capture()) return error;
  std::vector<int> all{default_streams_.at(static_cast<size_t>(which))->stream};
  for (const CUstream_st* stream : streams) {
    if (stream->device == which) all.push_back(stream->stream);
  }
  const std::vector<int> destroyed = std::exchange(destroyed_streams_[which], {});
  all.insert(all.end(), destroyed.begin(), destroyed.end());
  for (const int stream : all) {
    const SignalPtr end = signal_on(stream);
    if (const cudaError_t error = wait_for_signal(*end)) return error;
    machine.host_clock().join(machine.clock_of(stream));
  }
  machine.forget_the_past();
  return cudaSuccess;
}

cudaError_t Runtime::refuse_in_capture(cudaStream_t stream) {
  if (stream->capture == nullptr) return refuse_in_global_capture();
  stream->capture->is_broken = true;
  return cudaErrorStreamCaptureUnsupported;
}

// Captures of other threads matter only if they and this thread are in the global mode.
cudaError_t Runtime::refuse_in_global_capture() {
  if (capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (const CapturePtr& capture : captures) {
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    const bool both_global =
        capture_mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (capture->thread != std::this_thread::get_id() && !both_global) continue;
    capture->is_broken = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  return cudaSuccess;
}

// --- Kernels ---

std::shared_ptr<const Program> Runtime::kernel_of(const void* host_function) {
  why_not_.clear();
  if (const auto own = kernels_of_modules_.find(host_function); own != kernels_of_modules_.end()) {
    return own->second;
  }
  const auto found = registered().functions.find(host_function);
  if (found == registered().functions.end()) return nullptr;
  const auto& [fat_binary, name] = found->second;
  try {
    if (auto loaded = machine.kernel_named(name)) return loaded;
    load_module_of(name, fat_binary);
    return machine.kernel_named(name);
  } catch (const std::exception& error) {
    why_not_ = "kernel " + name + ": " + error.what();
    std::fprintf(stderr, "the GPU in software: %s\n", why_not_.c_str());
    return nullptr;
  }
}

void Runtime::forget_kernel(const void* handle) {
  kernels_of_modules_.erase(handle);
  shared_limits_.erase(handle);
  std::erase_if(loaded_functions_, [&](const auto& one) { return one.first == handle; });
}

void Runtime::load_module_of(const std::string& kernel, const void* fat_binary) {
  if (options.ptx_folder.empty()) {
    if (loaded_modules_.insert(fat_binary).second) machine.load(module_of(fat_binary));
    return;
  }
  if (!files_of_kernels_)
    files_of_kernels_ = files_of_kernels(options.ptx_folder, options.capability.sm);
  const auto file = files_of_kernels_->find(kernel);
  if (file == files_of_kernels_->end()) throw std::runtime_error("its PTX is not at hand");
  if (loaded_files_.insert(file->second).second) machine.load(module_of_file(file->second));
}

cudaError_t Runtime::load_on_device(const void* host_function, bool is_launch) {
  if (!loaded_functions_.emplace(host_function, device).second || !is_launch) return cudaSuccess;
  if (!captures.empty()) return cudaSuccess;  // nothing is launched yet
  return wait_for_device(device);
}

}  // namespace axonn::gpu_machine
