// Process-wide settings of the fused ops on CUDA, and the number of SMs that collectives use.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace axonn::ops {

// The values that axonn_ext/spec/settings.py reads.
struct FusedSettings {
  int64_t nccl_sms = 0;  // SMs left to NCCL by a fused gather across hosts; 0: none is fused
  // SMs that every fused GEMM leaves free; if not set, as many as collectives use (add_busy_sms).
  std::optional<int64_t> free_sms;
  bool graphs_in_turn = false;  // whether CUDA graphs run their branches one after the other
};
void configure_fused_on_cuda(const FusedSettings& settings);

// Adds to the number of SMs that collectives use while the device's current stream runs; pass a
// negative number when they have ended. Thread-safe.
void add_busy_sms(c10::DeviceIndex device, int64_t sms);

// The current settings, and the number of SMs to leave free on a device.
FusedSettings fused_settings();
int64_t free_sms_on(c10::DeviceIndex device);

}  // namespace axonn::ops
