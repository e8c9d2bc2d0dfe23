// Process-wide settings of the fused ops on CUDA, and the SMs that collectives use.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace axonn::ops {

// As axonn_ext/spec/settings.py read them.
struct FusedSettings {
  int64_t nccl_sms = 0;  // that a fused gather across hosts leaves to NCCL; 0: there is none
  // SMs that every fused GEMM leaves free; if not set, as many as collectives take (add_busy_sms).
  std::optional<int64_t> free_sms;
  bool graphs_in_turn = false;  // whether CUDA graphs run their branches one after the other
};
void configure_fused_on_cuda(const FusedSettings& settings);

// Adds to the SMs that collectives use while the device's current stream runs; negative when they
// have ended. Thread-safe.
void add_busy_sms(c10::DeviceIndex device, int64_t sms);

// The current settings, and the SMs to leave free on a device.
FusedSettings fused_settings();
int64_t free_sms_on(c10::DeviceIndex device);

}  // namespace axonn::ops
