// griddepcontrol: a kernel that may begin before its predecessor ends sees the predecessor's writes
// after griddepcontrol.wait, and not before.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu_machine/kernel_text.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint64_t kSeeds = 20;

struct Step {
  std::string body;
  bool overlaps;
};

// Runs kernels of one thread in a stream, one after the other. Their output has 4 words.
std::vector<uint32_t> run(const std::vector<Step>& steps, uint64_t seed, bool copies_between) {
  Options options;
  options.seed = seed;
  Machine machine(options);
  const uint64_t out = machine.put(std::vector<uint32_t>(4, 0), "out");
  const int stream = machine.new_stream(0);
  for (size_t i = 0; i < steps.size(); ++i) {
    std::string ptx = testing::kernel_of(steps[i].body);
    ptx.replace(ptx.find(".entry test"), 11, ".entry step" + std::to_string(i));
    machine.load(ptx);
    if (i > 0 && copies_between) machine.copy(stream, out + 12, out, 4);
    std::vector<std::byte> argument(sizeof(out));
    std::memcpy(argument.data(), &out, sizeof(out));
    machine.enqueue(stream, machine.kernel("step" + std::to_string(i)), {}, {}, {argument}, 0, {},
                    false, steps[i].overlaps);
  }
  machine.run();
  return machine.get<uint32_t>(out, 4);
}

const std::string kWrite = "st.global.u32 [%out], 5;\n";
const std::string kRead = "ld.global.u32 %r1, [%out]; st.global.u32 [%out+4], %r1;\n";
const std::string kWait = "griddepcontrol.wait;\n";
const std::string kTrigger = "griddepcontrol.launch_dependents;\n";

TEST(GridDependency, AKernelThatWaitsSeesWhatLiesInFrontOfIt) {
  const std::vector<std::vector<Step>> right = {
      {{kWrite, false}, {kRead, false}},  // it may not begin early, so it need not wait
      {{kTrigger + kWrite, false}, {kWait + kRead, true}},
      {{kWrite, false}, {kWait + kRead, true}},
      {{kWrite, false}, {kWait, true}, {kWait + kRead, true}},
      {{kWrite, false}, {kWait, true}, {kRead, false}},
  };
  for (size_t i = 0; i < right.size(); ++i) {
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      EXPECT_EQ(run(right[i], seed, false)[1], 5u) << "case " << i << ", seed " << seed;
    }
  }
}

TEST(GridDependency, AWaitLeftOutIsFound) {
  const std::vector<std::vector<Step>> wrong = {
      {{kWrite, false}, {kRead, true}},
      {{kWrite + kTrigger, false}, {kRead + kWait, true}},
      // The second kernel does not wait, so the third may begin before the first has ended.
      {{kWrite, false}, {kTrigger, true}, {kRead, true}},
      // A write to memory that the previous kernel still reads.
      {{kWrite, false}, {kRead, false}, {kWrite, true}},
  };
  for (size_t i = 0; i < wrong.size(); ++i) {
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      EXPECT_THROW(run(wrong[i], seed, false), MachineError) << "case " << i << ", seed " << seed;
    }
  }
}

TEST(GridDependency, OnlyAKernelBehindAKernelMayBeginEarly) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_EQ(run({{kWrite, false}, {kRead, true}}, seed, true)[1], 5u);
  }
}

}  // namespace
}  // namespace axonn::gpu_machine
