// The CTAs that are on a device at a time. An SM holds as many CTAs as its threads, registers and
// shared memory allow; the others wait until some leave. Source: NVIDIA, CUDA C++ Programming
// Guide, "Compute Capabilities", for compute capability 9.0.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "gpu_machine/program.h"

namespace axonn::gpu_machine {

// Limits of an SM. The driver reserves some shared memory of each CTA for itself.
inline constexpr uint64_t kThreadsOfSm = 2048, kCtasOfSm = 32, kRegistersOfSm = 65536;
inline constexpr uint64_t kSharedOfSm = 233472, kReservedShared = 1024;

// PTX does not say how many registers ptxas gives each thread. This is the largest number it may:
// .maxnreg if given, else as many as fit an SM with .minnctapersm CTAs of .maxntid threads, or with
// one CTA of the launch's threads; in steps of 8, and no more than an instruction can name.
uint32_t registers_of_thread(const Program& program, uint64_t threads);

// The resources of an SM that a CTA takes.
struct Footprint {
  uint64_t threads = 0;  // in whole warps
  uint64_t registers = 0;
  uint64_t shared_bytes = 0;
};
Footprint footprint_of(const Program& program, uint64_t threads, uint64_t dynamic_shared_bytes);

// How many such CTAs fit on an SM; 0 if not even one fits.
int ctas_of_sm(const Footprint& cta);

// The SMs of a device.
class Residency {
 public:
  explicit Residency(int sms) : sms_(static_cast<size_t>(sms)) {}

  // Finds and takes room for each of `count` CTAs, starting the search at SM `first`. Returns their
  // SMs; or nothing, and takes none, if there is no room for all.
  std::optional<std::vector<int>> take(const Footprint& cta, uint64_t count, uint32_t first);
  void give(const Footprint& cta, int sm);

 private:
  struct Sm {
    uint64_t ctas = 0, threads = 0, registers = 0, shared_bytes = 0;
  };
  static bool fits(const Sm& sm, const Footprint& cta);

  std::vector<Sm> sms_;
};

}  // namespace axonn::gpu_machine
