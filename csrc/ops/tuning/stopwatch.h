// How long work takes on a device.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace axonn::ops {

// From the first piece of work that `run` gives the device to the end of the last. On a GPU:
// between two events of its current stream, for the second of which the host waits.
int64_t elapsed_ns(c10::Device device, c10::function_ref<void()> run);

// Whether the device's current stream is being captured into a graph: nothing may be timed then.
// false with a torch before 2.13, which cannot tell for any device.
bool is_capturing(c10::Device device);

}  // namespace axonn::ops
