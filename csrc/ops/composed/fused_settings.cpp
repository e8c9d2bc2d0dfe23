#include "ops/composed/fused_settings.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace axonn::ops {
namespace {

struct State {
  std::mutex mutex;
  FusedSettings settings;
  std::map<c10::DeviceIndex, int64_t> busy;
};

State& state() {
  static State all;
  return all;
}

}  // namespace

void configure_fused_on_cuda(const FusedSettings& settings) {
  const std::lock_guard lock(state().mutex);
  state().settings = settings;
}

void add_busy_sms(c10::DeviceIndex device, int64_t sms) {
  const std::lock_guard lock(state().mutex);
  state().busy[device] += sms;
}

FusedSettings fused_settings() {
  const std::lock_guard lock(state().mutex);
  return state().settings;
}

int64_t free_sms_on(c10::DeviceIndex device) {
  const std::lock_guard lock(state().mutex);
  if (state().settings.free_sms) return *state().settings.free_sms;
  const auto found = state().busy.find(device);
  return found == state().busy.end() ? 0 : std::max<int64_t>(found->second, 0);
}

}  // namespace axonn::ops
