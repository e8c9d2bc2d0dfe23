#include "gpu_machine/runtime/runtime.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "gpu_machine/runtime/fat_binary.h"

namespace axonn::gpu_machine {
namespace {

Runtime*& current_runtime() {
  static Runtime* current = nullptr;
  return current;
}

cudaError_t error_of(MachineError::Kind kind) {
  switch (kind) {
    case MachineError::Kind::kTrap:
      return cudaErrorLaunchFailure;
    case MachineError::Kind::kMemory:
      return cudaErrorIllegalAddress;
    default:
      return cudaErrorUnknown;  // what no GPU notices
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
  current_runtime() = this;
}

Runtime::~Runtime() {
  current_runtime() = nullptr;
  for (CUstream_st* stream : streams) delete stream;
}

Runtime& Runtime::current() {
  if (current_runtime() == nullptr) {
    // CUDA's functions have no way to say so: exceptions would end in destructors that call them.
    std::fputs("a function of CUDA was called without a Runtime\n", stderr);
    std::abort();
  }
  return *current_runtime();
}

void Runtime::fail(const std::string& function, cudaError_t error, int skipped) {
  injected_[function] = {error, skipped};
}

int Runtime::calls_of(const std::string& function) const {
  const auto found = calls_.find(function);
  return found == calls_.end() ? 0 : found->second;
}

cudaError_t Runtime::enter(const char* function) {
  ++calls_[function];
  if (failure_) return leave(error_of(failure_->kind()));
  const auto found = injected_.find(function);
  if (found != injected_.end() && found->second.skipped-- == 0) {
    const cudaError_t error = found->second.error;
    injected_.erase(found);
    return leave(error);
  }
  give_turns(static_cast<int>(random_() % (options.most_turns + 1)));
  return failure_ ? leave(error_of(failure_->kind())) : cudaSuccess;
}

cudaError_t Runtime::leave(cudaError_t status) {
  if (status != cudaSuccess && status != cudaErrorNotReady) last_error_ = status;
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
    return machine.turn() == Machine::Turn::kWent;
  } catch (const MachineError& error) {
    failure_ = error;
    return false;
  }
}

void Runtime::give_turns(int count) {
  while (count-- > 0 && run_once()) {
  }
}

// --- Streams ---

cudaStream_t Runtime::resolve(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) {
    return default_streams_[static_cast<size_t>(device)].get();
  }
  return std::find(streams.begin(), streams.end(), stream) == streams.end() ? nullptr : stream;
}

// The default stream and those that were not created as non-blocking wait for each other.
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

cudaError_t Runtime::submit(cudaStream_t handle, std::function<void(int stream)> enqueue) {
  CUstream_st* stream = resolve(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (stream->capture != nullptr) {
    if (stream->capture->is_broken) return cudaErrorStreamCaptureInvalidated;
    auto& nodes = stream->capture->nodes;
    nodes.push_back({Node::Kind::kWork, stream->device, stream->tips, std::move(enqueue), nullptr});
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

SignalPtr Runtime::signal_on(int stream) {
  auto signal = std::make_shared<Signal>();
  machine.enqueue_task(stream, "a signal", [signal](Agent& agent) {
    signal->is_done = true;
    signal->at_ns = agent.machine.now_ns();
    signal->clock = agent.clock;
    return true;
  });
  return signal;
}

void Runtime::wait_on(int stream, const SignalPtr& signal, const std::string& what) {
  machine.enqueue_task(stream, "waits for " + what, [signal](Agent& agent) {
    if (signal->is_done) agent.clock.join(signal->clock);
    return signal->is_done;
  });
}

cudaError_t Runtime::wait_for_signal(const Signal& signal) {
  while (!signal.is_done && run_once()) {
  }
  if (!signal.is_done && !failure_) {
    try {
      machine.fail_deadlock("the host waits for what cannot happen");
    } catch (const MachineError& error) {
      failure_ = error;
    }
  }
  if (failure_) return error_of(failure_->kind());
  machine.host_clock().join(signal.clock);
  return cudaSuccess;
}

cudaError_t Runtime::wait_for_stream(cudaStream_t handle) {
  CUstream_st* stream = resolve(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = refuse_in_capture(stream)) return error;
  order_with_default_stream(stream);
  const SignalPtr end = signal_on(stream->stream);
  const cudaError_t status = wait_for_signal(*end);
  if (status == cudaSuccess) {
    machine.host_clock().join(machine.clock_of(stream->stream));
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

cudaError_t Runtime::refuse_in_global_capture() {
  for (const CapturePtr& capture : captures) {
    if (capture->mode == cudaStreamCaptureModeRelaxed) continue;
    capture->is_broken = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  return cudaSuccess;
}

// --- Kernels ---

std::shared_ptr<const Program> Runtime::kernel_of(const void* host_function) {
  const auto found = registered().functions.find(host_function);
  if (found == registered().functions.end()) return nullptr;
  const auto& [module, name] = found->second;
  if (loaded_modules_.insert(module).second) machine.load(registered().modules[module]);
  return machine.kernel_named(name);
}

cudaError_t Runtime::load_on_device(const void* host_function, bool is_launch) {
  if (!loaded_functions_.emplace(host_function, device).second || !is_launch) return cudaSuccess;
  if (!captures.empty()) return cudaSuccess;  // which launches nothing yet
  return wait_for_device(device);
}

}  // namespace axonn::gpu_machine
