// Kernels on boxes of a tensor, and the contents of a box, worked out element by element.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gpu_machine/kernel_text.h"
#include "gpu_machine/machine.h"
#include "gpu_machine/tensor_map.h"

namespace axonn::gpu_machine::testing {

inline constexpr uint64_t kData = 1024, kResult = 65536, kBytes = 131072;  // offsets in the output

// A tensor of 16-bit elements, first dim first.
struct Tensor {
  std::vector<uint64_t> sizes, strides;  // strides in bytes, from the second dim on
  std::vector<uint32_t> box;
  int swizzle = 0;                // CU_TENSOR_MAP_SWIZZLE_NONE, _32B, _64B, _128B
  int type = 1;                   // CU_TENSOR_MAP_DATA_TYPE_UINT16
  std::vector<uint32_t> steps{};  // along each dim; empty means all 1
};

inline int encode(void* map, const Tensor& tensor, uint64_t base) {
  const std::vector<uint32_t> ones(tensor.sizes.size(), 1);
  const std::vector<uint32_t>& steps = tensor.steps.empty() ? ones : tensor.steps;
  return encode_tiled(map, tensor.type, static_cast<uint32_t>(tensor.sizes.size()), base,
                      tensor.sizes.data(), tensor.strides.data(), tensor.box.data(), steps.data(),
                      0, tensor.swizzle, 2, 0);
}

// Runs a body whose %out starts with the descriptor; the tensor follows at kData.
inline std::vector<uint16_t> run(const Tensor& tensor, const std::string& body,
                                 const std::vector<uint16_t>& data, uint64_t seed, Dim cluster = {},
                                 uint32_t threads = 1) {
  Options options;
  options.seed = seed;
  options.patience = 200'000;
  Machine machine(options);
  machine.load(testing::kernel_of(
      body, ".shared .align 8 .b64 barrier; .shared .align 1024 .b8 buffer[16384];"));
  const uint64_t out = machine.memory().allocate(kBytes, "out");
  const std::vector<uint16_t> zeros(kBytes / 2, 0);
  machine.memory().write(out, zeros.data(), kBytes);
  machine.memory().write(out + kData, data.data(), 2 * data.size());
  alignas(64) std::byte map[kTensorMapBytes];
  EXPECT_EQ(encode(map, tensor, out + kData), 0);
  machine.memory().write(out, map, sizeof(map));
  std::vector<std::byte> argument(sizeof(out));
  std::memcpy(argument.data(), &out, sizeof(out));
  machine.enqueue(machine.new_stream(0), machine.kernel("test"), cluster, {threads, 1, 1},
                  {argument}, 0, cluster);
  machine.run();
  return machine.get<uint16_t>(out, kBytes / 2);
}

// Loads a box and copies `bytes` bytes of shared memory to kResult, unchanged.
inline std::string load_body(const std::string& dims, const std::string& coordinates,
                             uint64_t bytes) {
  return R"(
  mov.u32 %r1, barrier;
  mov.u32 %r2, buffer;
  mbarrier.init.shared::cta.b64 [%r1], 1;
  fence.mbarrier_init.release.cluster;
  prefetch.tensormap [%out];
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], )" +
         std::to_string(bytes) + R"(;
  cp.async.bulk.tensor.)" +
         dims + R"(.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2], [%out, )" +
         coordinates + R"(], [%r1];
WAIT:
  mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0;
  @!%p1 bra WAIT;
  mov.u32 %r3, 0;
  add.s64 %d1, %out, )" +
         std::to_string(kResult) + R"(;
COPY:
  ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r2];
  st.global.v4.u32 [%d1], {%r4, %r5, %r6, %r7};
  add.s32 %r2, %r2, 16;
  add.s64 %d1, %d1, 16;
  add.s32 %r3, %r3, 16;
  setp.lt.u32 %p2, %r3, )" +
         std::to_string(bytes) + R"(;
  @%p2 bra COPY;
)";
}

inline std::vector<uint16_t> random_values(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) value = static_cast<uint16_t>(1 + random() % 60000);
  return values;
}

// The element of the tensor at these indices; zero outside.
inline uint16_t element(const Tensor& tensor, const std::vector<uint16_t>& data,
                        const std::vector<int64_t>& at) {
  uint64_t byte = 0;
  for (size_t i = 0; i < at.size(); ++i) {
    if (at[i] < 0 || at[i] >= static_cast<int64_t>(tensor.sizes[i])) return 0;
    byte += static_cast<uint64_t>(at[i]) * (i == 0 ? 2 : tensor.strides[i - 1]);
  }
  return data[byte / 2];
}

inline std::vector<uint16_t> expected_box(const Tensor& tensor, const std::vector<uint16_t>& data,
                                          const std::vector<int64_t>& at) {
  std::vector<uint16_t> box;
  std::vector<int64_t> inside(at.size(), 0);
  for (bool more = true; more;) {
    std::vector<int64_t> place = at;
    for (size_t i = 0; i < at.size(); ++i) place[i] += inside[i];
    box.push_back(element(tensor, data, place));
    more = false;
    for (size_t i = 0; i < at.size() && !more; ++i) {
      inside[i] += i == 0 || tensor.steps.empty() ? 1 : tensor.steps[i];  // none along the first
      more = inside[i] < tensor.box[i];
      if (!more) inside[i] = 0;
    }
  }
  return box;
}

inline std::string braces(const std::vector<int64_t>& at) {
  std::string text;
  for (const int64_t place : at) text += (text.empty() ? "{" : ", ") + std::to_string(place);
  return text + "}";
}

}  // namespace axonn::gpu_machine::testing
