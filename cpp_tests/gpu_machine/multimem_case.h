// Two devices whose memory has several addresses: one of each device, one of both, and a second one
// for the first device.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "gpu_machine/kernel_text.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine::testing {

inline constexpr uint64_t kTeamSeeds = 20;
inline constexpr uint64_t kTeamBytes = 256;

// Two devices, each with its own memory. A kernel gets a table with the addresses of the first
// device's memory, the second one's, both (multicast), and a second address of the first one's.
// Registers %d10 to %d13 hold them, and %d14 is the address of 16 words for results.
class Team {
 public:
  explicit Team(uint64_t seed) : machine_(options_of(seed)) {
    Memory& memory = machine_.memory();
    for (int device = 0; device < 2; ++device) {
      regions_.push_back(&memory.create(kTeamBytes, "memory of device " + std::to_string(device)));
    }
    std::vector<uint64_t> table;
    for (Region* region : regions_) {
      table.push_back(memory.reserve());
      EXPECT_TRUE(memory.map(table.back(), *region));
    }
    table.push_back(memory.reserve());
    memory.map_team(table.back(), regions_);
    table.push_back(memory.reserve());
    EXPECT_TRUE(memory.map(table.back(), *regions_[0]));
    result_ = machine_.put(std::vector<uint32_t>(16, 0), "result");
    table.push_back(result_);
    unicast_ = {table[0], table[1]};
    table_ = machine_.put(table, "table");
  }

  // Fills a device's memory with words.
  void fill(size_t device, const std::vector<uint32_t>& words) {
    machine_.memory().write(unicast_[device], words.data(), words.size() * sizeof(uint32_t));
  }
  std::vector<uint32_t> words(size_t device, uint64_t first, size_t count) {
    return machine_.get<uint32_t>(unicast_[device] + 4 * first, count);
  }
  std::vector<uint32_t> result(size_t count) { return machine_.get<uint32_t>(result_, count); }

  // Enqueues a kernel on a device's stream.
  void launch(int device, const std::string& body, uint32_t threads = 1) {
    const std::string name = "kernel" + std::to_string(++kernels_);
    std::string ptx = kernel_of(R"(
  ld.global.u64 %d10, [%out];
  ld.global.u64 %d11, [%out+8];
  ld.global.u64 %d12, [%out+16];
  ld.global.u64 %d13, [%out+24];
  ld.global.u64 %d14, [%out+32];
)" + body);
    ptx.replace(ptx.find(".entry test"), 11, ".entry " + name);
    machine_.load(ptx);
    std::vector<std::byte> argument(sizeof(table_));
    std::memcpy(argument.data(), &table_, sizeof(table_));
    machine_.enqueue(machine_.new_stream(device), machine_.kernel(name), {}, {threads, 1, 1},
                     {argument}, 0);
  }
  void run() { machine_.run(); }

 private:
  static Options options_of(uint64_t seed) {
    Options options;
    options.seed = seed;
    options.patience = 200'000;
    return options;
  }

  Machine machine_;
  std::vector<Region*> regions_;
  std::vector<uint64_t> unicast_;
  uint64_t result_ = 0, table_ = 0;
  int kernels_ = 0;
};

using Words = std::vector<uint32_t>;

// Returns for how many seeds the run ends with an error that contains these words.
inline int failures(const std::vector<std::pair<int, std::string>>& kernels,
                    const std::string& words, uint32_t threads = 1) {
  int count = 0;
  for (uint64_t seed = 0; seed < kTeamSeeds; ++seed) {
    Team team(seed);
    team.fill(0, Words(kTeamBytes / 4, 0));
    team.fill(1, Words(kTeamBytes / 4, 0));
    for (const auto& [device, body] : kernels) team.launch(device, body, threads);
    try {
      team.run();
    } catch (const MachineError& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
      ++count;
    }
  }
  return count;
}

}  // namespace axonn::gpu_machine::testing
