// A product of a warpgroup as a kernel: the layout of its operands, and the expected result.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gpu_machine/kernel_text.h"
#include "gpu_machine/machine.h"
#include "gpu_machine/matrix_case.h"

namespace axonn::gpu_machine::testing {

inline constexpr int kTile = 65536;  // bytes of shared memory for each of A and B
inline constexpr int kThreads = 128;

// The layout of a matrix [rows along M or N, K] in memory.
struct Layout {
  int row_bytes = 128;  // of the swizzle pattern; 16: none
  bool along_k = true;  // whether elements are contiguous along K
  int first_k = 0;      // the first column that is used
  int base = 0;         // shift of the pattern, in rows of 128 bytes

  int leading() const { return row_bytes == 16 || !along_k ? 2048 : 16; }
  int stride() const { return along_k ? 8 * row_bytes : row_bytes == 16 ? 4096 : 16384; }
  int start() const { return 128 * base; }

  // In bytes from the start of the tile.
  int offset(int row, int k, int bytes) const {
    const int chunk = 16 / bytes, wide = row_bytes / bytes;
    int at = 0;
    if (along_k && row_bytes == 16) {
      at = row % 8 * 16 + row / 8 * stride() + k / chunk * leading() + k % chunk * bytes;
    } else if (along_k) {
      at = row % 8 * row_bytes + row / 8 * stride() + k * bytes;
    } else if (row_bytes == 16) {
      at = row % chunk * bytes + row / chunk * stride() + k % 8 * 16 + k / 8 * leading();
    } else {
      at = row % wide * bytes + row / wide * leading() + k % 8 * row_bytes + k / 8 * stride();
    }
    const int swizzle = (at >> 7) & (row_bytes / 16 - 1);
    return start() + (at ^ swizzle << 4);
  }
  // Does not include the address of the tile.
  uint64_t descriptor(int bytes) const {
    const uint64_t mode = row_bytes == 128 ? 1 : row_bytes == 64 ? 2 : row_bytes == 32 ? 3 : 0;
    const int first = start() + (along_k && row_bytes > 16 ? first_k * bytes : 0);
    return static_cast<uint64_t>(first / 16) | static_cast<uint64_t>(leading() / 16) << 16 |
           static_cast<uint64_t>(stride() / 16) << 32 | static_cast<uint64_t>(base) << 49 |
           mode << 62;
  }
};

struct Multiplication {
  std::string type = "bf16", sums = "f32";
  int columns = 16;
  Layout a{}, b{};
  bool a_in_registers = false, adds = true;
  int sign_a = 1, sign_b = 1;
  // PTX inserted in these places; the defaults are all that is needed.
  std::string fence = "wgmma.fence.sync.aligned;", before = "fence.proxy.async.shared::cta;",
              behind_issue = "", wait = "wgmma.wait_group.sync.aligned 0;", behind_wait = "";
  int instructions = 1;       // in sequence, with the same operands
  uint64_t spoiled_bits = 0;  // set in the descriptor of A

  int depth() const { return type == "tf32" ? 8 : 16; }
  int sum_registers() const { return sums == "f16" ? columns / 4 : columns / 2; }
};

inline Place sum_of(int warp, int lane, int i) {
  return {16 * warp + lane / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * (lane % 4) + i % 2};
}
// For 16-bit elements, and for tf32 (wide).
inline Place a_of(int lane, int i, bool is_wide) {
  if (is_wide) return {lane / 4 + 8 * (i % 2), lane % 4 + 4 * (i / 2)};
  return {lane / 4 + 8 * (i / 2 % 2), 2 * (lane % 4) + i % 2 + 8 * (i / 4)};
}

// The kernel copies the tiles to shared memory, loads its registers, multiplies, and stores sums.
inline std::string kernel_text(const Multiplication& what) {
  const int sums = what.sum_registers(), in_registers = what.a_in_registers ? 4 : 0;
  const int first_register = 2 * kTile;
  std::string load, store;
  for (int i = 0; i < sums + in_registers; ++i) {
    const std::string place = std::to_string(first_register + 4 * kThreads * i);
    const std::string name = "%s" + std::to_string(i);
    load += "  ld.global.u32 " + name + ", [%d1+" + place + "];\n";
    if (i < sums) store += "  st.global.u32 [%d1+" + place + "], " + name + ";\n";
  }
  const int bytes = bytes_in(what.type);
  const std::string a = what.a_in_registers ? registers(sums, 4, "%s") : "%d6";
  const std::string majors = what.type == "tf32" ? ""
                                                 : (what.a_in_registers ? ""
                                                    : what.a.along_k    ? ", 0"
                                                                        : ", 1") +
                                                       std::string(what.b.along_k ? ", 0" : ", 1");
  std::string multiply;
  for (int i = 0; i < what.instructions; ++i) {
    multiply += "  wgmma.mma_async.sync.aligned.m64n" + std::to_string(what.columns) + "k" +
                std::to_string(what.depth()) + "." + what.sums + "." + what.type + "." + what.type +
                " " + registers(0, sums, "%s") + ", " + a + ", %d7, %p2, " +
                std::to_string(what.sign_a) + ", " + std::to_string(what.sign_b) + majors + ";\n";
  }
  return R"(
  .reg .b32 %s<140>;
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %d1, %r1, 4;
  add.s64 %d1, %out, %d1;
  mov.u32 %r3, tiles;
  shl.b32 %r4, %r1, 2;
  add.u32 %r5, %r3, %r4;
  mov.u64 %d2, %d1;
  mov.u32 %r6, 0;
COPY:
  ld.global.u32 %r7, [%d2];
  st.shared.u32 [%r5], %r7;
  add.s64 %d2, %d2, 512;
  add.u32 %r5, %r5, 512;
  add.u32 %r6, %r6, 512;
  setp.lt.u32 %p1, %r6, )" +
         std::to_string(2 * kTile) + ";\n  @%p1 bra COPY;\n" + what.before + "\n  bar.sync 0;\n" +
         load + R"(
  shr.u32 %r8, %r3, 4;
  cvt.u64.u32 %d5, %r8;
  add.s64 %d6, %d5, )" +
         std::to_string(what.a.descriptor(bytes) | what.spoiled_bits) + ";\n  add.s64 %d7, %d5, " +
         std::to_string(what.b.descriptor(bytes) + kTile / 16) + ";\n  setp.eq.u32 %p2, 0, " +
         (what.adds ? "0" : "1") + ";\n  " + what.fence + "\n" + multiply +
         "  wgmma.commit_group.sync.aligned;\n  " + what.behind_issue + "\n  " + what.wait +
         "\n  " + what.behind_wait + "\n" + store;
}

struct Operands {
  std::vector<float> a, b, c;
  std::vector<uint32_t> words;  // input of the kernel
};

inline Operands operands_of(const Multiplication& what, std::mt19937& random) {
  const int depth = what.depth(), columns = what.columns, bytes = bytes_in(what.type);
  Operands made{testing::draw_small(64 * depth, random),
                testing::draw_small(columns * depth, random),
                testing::draw_small(64 * columns, random),
                std::vector<uint32_t>(2 * kTile / 4, 0xFFFFFFFFu)};  // NaNs around the matrices
  const auto put = [&](const Layout& layout, const std::vector<float>& matrix, int rows, int tile) {
    for (int row = 0; row < rows; ++row) {
      for (int k = 0; k < depth; ++k) {
        const uint32_t bits =
            testing::bits_in(what.type, matrix[static_cast<size_t>(row * depth + k)]);
        const int at = tile + layout.offset(row, layout.first_k + k, bytes);
        std::memcpy(reinterpret_cast<std::byte*>(made.words.data()) + at, &bits,
                    static_cast<size_t>(bytes));
      }
    }
  };
  put(what.a, made.a, 64, 0);
  put(what.b, made.b, columns, kTile);
  std::vector<std::vector<uint32_t>> by_warp(4);
  for (int warp = 0; warp < 4; ++warp) {
    auto& words = by_warp[static_cast<size_t>(warp)];
    testing::append_fragments(
        words, made.c, columns, what.sums == "f16" ? "f16" : "f32",
        [&](int lane, int i) { return sum_of(warp, lane, i); }, columns / 2);
    if (!what.a_in_registers) continue;
    testing::append_fragments(
        words, made.a, depth, what.type,
        [&](int lane, int i) {
          const Place at = a_of(lane, i, what.type == "tf32");
          return Place{at.row + 16 * warp, at.column};
        },
        depth / 2);
  }
  for (size_t i = 0; i < by_warp[0].size(); i += kLanes) {  // [register][thread]
    for (const auto& words : by_warp) {
      made.words.insert(made.words.end(), words.begin() + static_cast<int64_t>(i),
                        words.begin() + static_cast<int64_t>(i) + kLanes);
    }
  }
  return made;
}

inline std::vector<uint32_t> run(const Multiplication& what, const Operands& operands,
                                 uint64_t seed) {
  Options options;
  options.seed = seed;
  Machine machine(options);
  machine.load(testing::kernel_of(
      kernel_text(what), ".shared .align 1024 .b8 tiles[" + std::to_string(2 * kTile) + "];"));
  const uint64_t out = machine.put(operands.words, "words");
  machine.launch(machine.new_stream(0), machine.kernel("test"), {1, 1, 1}, {kThreads, 1, 1}, out);
  machine.run();
  return machine.get<uint32_t>(out, operands.words.size());
}

inline void check(const Multiplication& what, uint64_t seed) {
  std::mt19937 random(static_cast<uint32_t>(seed) + 5);
  const Operands operands = operands_of(what, random);
  const auto got = run(what, operands, seed);
  const int depth = what.depth(), columns = what.columns;
  const int per = what.sums == "f16" ? 2 : 1;
  int wrong = 0;
  for (int warp = 0; warp < 4; ++warp) {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < columns / 2; ++i) {
        const Place at = sum_of(warp, lane, i);
        double expected =
            what.adds ? operands.c[static_cast<size_t>(at.row * columns + at.column)] : 0;
        for (int k = 0; k < depth; ++k) {
          expected += what.instructions * what.sign_a * what.sign_b *
                      static_cast<double>(operands.a[static_cast<size_t>(at.row * depth + k)]) *
                      operands.b[static_cast<size_t>(at.column * depth + k)];
        }
        const uint32_t word =
            got[static_cast<size_t>(2 * kTile / 4 + i / per * kThreads + warp * kLanes + lane)];
        const float value = testing::value_in(what.sums, word >> (16 * (i % per)));
        if (value != expected && ++wrong < 5) {
          ADD_FAILURE() << "row " << at.row << ", column " << at.column << ": " << value
                        << ", expected " << expected;
        }
      }
    }
  }
  EXPECT_EQ(wrong, 0);
}

}  // namespace axonn::gpu_machine::testing
