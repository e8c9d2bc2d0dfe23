// Properties of a GPU that depend on its compute capability.
// Source: NVIDIA, CUDA C++ Programming Guide, "Compute Capabilities".
#pragma once

#include <stdexcept>
#include <string>

namespace axonn::gpu_machine {

struct Capability {
  int sm = 90;                                          // 10 * major + minor
  int shared_of_block = 232448, shared_of_sm = 233472;  // bytes

  int major() const { return sm / 10; }
  int minor() const { return sm % 10; }
};

// Throws std::invalid_argument for an unknown compute capability.
inline Capability capability_of(int sm) {
  if (sm == 90) return {};
  if (sm == 80) return {80, 166912, 167936};
  throw std::invalid_argument("expected a compute capability of 80 or 90, got " +
                              std::to_string(sm));
}

}  // namespace axonn::gpu_machine
