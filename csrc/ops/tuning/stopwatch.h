// Measures how long work takes on a device.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace axonn::ops {

// Returns the time from the start of the first work that `run` gives the device to the end of the
// last. On a GPU, two events on the current stream give it, and the host waits for the second.
int64_t elapsed_ns(c10::Device device, c10::function_ref<void()> run);

// Returns whether the device's current stream is being captured into a graph, when nothing may be
// timed. Before version 2.13, torch cannot tell, and the result is false.
bool is_capturing(c10::Device device);

}  // namespace axonn::ops
