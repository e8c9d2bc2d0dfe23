// A small kernel, run with many seeds.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "gpu_machine/kernel_text.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine::testing {

inline constexpr int kSeeds = 20;

struct Case {
  std::string body;
  std::string variables = "";
  Dim grid{1, 1, 1}, block{32, 1, 1};
  size_t words = 256;      // in the output
  bool is_written = true;  // starts as zeros
  uint64_t patience = 200'000;
  Dim cluster{1, 1, 1};
};

inline std::vector<uint32_t> run(const Case& what, uint64_t seed) {
  Options options;
  options.seed = seed;
  options.patience = what.patience;
  Machine machine(options);
  machine.load(kernel_of(what.body, what.variables));
  const uint64_t out = what.is_written ? machine.put(std::vector<uint32_t>(what.words, 0), "out")
                                       : machine.memory().allocate(4 * what.words, "out");
  std::vector<std::byte> argument(sizeof(out));
  std::memcpy(argument.data(), &out, sizeof(out));
  machine.enqueue(machine.new_stream(0), machine.kernel("test"), what.grid, what.block, {argument},
                  0, what.cluster);
  machine.run();
  return machine.get<uint32_t>(out, what.words);
}

// Runs it with many seeds. Returns how often it fails with this kind of error; expects no other
// errors, and that messages contain the given names.
inline int failures(const Case& what, MachineError::Kind kind,
                    const std::vector<std::string>& names) {
  int count = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    try {
      run(what, seed);
    } catch (const MachineError& error) {
      EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind)) << error.what();
      for (const std::string& name : names) {
        EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
      }
      ++count;
    }
  }
  return count;
}

// %r1 = lane, %d1 = out + 4 lane
inline const std::string kLane = R"(
  mov.u32 %r1, %laneid;
  mul.wide.u32 %d1, %r1, 4;
  add.s64 %d1, %out, %d1;
)";
// %r1 = thread of the CTA, %d1 = out + 4 thread
inline const std::string kThread = R"(
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %d1, %r1, 4;
  add.s64 %d1, %out, %d1;
)";

}  // namespace axonn::gpu_machine::testing
