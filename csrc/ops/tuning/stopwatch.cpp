#include "ops/tuning/stopwatch.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>

#include <chrono>

namespace axonn::ops {

int64_t elapsed_ns(c10::Device device, c10::function_ref<void()> run) {
  if (device.is_cpu()) {
    const auto start = std::chrono::steady_clock::now();
    run();
    const auto elapsed = std::chrono::steady_clock::now() - start;
    return std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count();
  }
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  // BACKEND_DEFAULT makes events that record a time; torch's own default makes events that do not.
  c10::Event begin(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  c10::Event end(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  begin.record(stream);
  run();
  end.record(stream);
  end.synchronize();
  return static_cast<int64_t>(begin.elapsedTime(end) * 1e6);
}

bool is_capturing([[maybe_unused]] c10::Device device) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  if (device.is_cpu()) return false;
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.isStreamCapturing(guard.getStream(device));
#else
  return false;
#endif
}

}  // namespace axonn::ops
