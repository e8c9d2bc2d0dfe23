// Warp-level matrix instructions, against sums in double. The places of elements are those of the
// PTX manual's figures (ISA 9.0, section 9.7.14.5), restated here element by element.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "core/numeric/data_type.h"
#include "gpu_machine/kernel_case.h"
#include "gpu_machine/matrix_case.h"

namespace axonn::gpu_machine {
namespace {

using testing::append_fragments;
using testing::Case;
using testing::draw_small;
using testing::failures;
using testing::kLane;
using testing::kSeeds;
using testing::Place;
using testing::registers;
using testing::value_in;

// Runs an instruction on registers that each lane loads from memory: %r10 and up hold the words
// [i][lane] of the input, and those from `results` on are stored as [i][lane].
std::vector<uint32_t> run_on_words(const std::string& instruction, const std::vector<uint32_t>& in,
                                   int results, int num_results) {
  std::string body = kLane;
  const size_t num_words = in.size() / kLanes;
  for (size_t i = 0; i < num_words; ++i) {
    body += "  ld.global.u32 %r" + std::to_string(10 + i) + ", [%d1+" + std::to_string(128 * i) +
            "];\n";
  }
  body += "  " + instruction + "\n";
  for (int i = 0; i < num_results; ++i) {
    body += "  st.global.u32 [%d1+" + std::to_string(128 * i) + "], %r" +
            std::to_string(results + i) + ";\n";
  }
  Machine machine;
  machine.load(testing::kernel_of(body));
  const uint64_t out = machine.put(in, "words");
  machine.launch(machine.new_stream(0), machine.kernel("test"), {1, 1, 1}, {32, 1, 1}, out);
  machine.run();
  return machine.get<uint32_t>(out, in.size());
}

// --- mma -----------------------------------------------------------------------------------------

// Element i of a lane's fragments, as the manual gives it for each shape.
Place a_of_k16(int lane, int i) {
  return {i < 2 || (i >= 4 && i < 6) ? lane / 4 : lane / 4 + 8,
          lane % 4 * 2 + (i & 1) + (i < 4 ? 0 : 8)};
}
Place b_of_k16(int lane, int i) { return {lane % 4 * 2 + (i & 1) + (i < 2 ? 0 : 8), lane / 4}; }
Place a_of_k8(int lane, int i) { return {i < 2 ? lane / 4 : lane / 4 + 8, lane % 4 * 2 + (i & 1)}; }
Place b_of_k8(int lane, int i) { return {lane % 4 * 2 + i, lane / 4}; }
Place a_of_tf32_k8(int lane, int i) {
  return {i % 2 == 0 ? lane / 4 : lane / 4 + 8, i < 2 ? lane % 4 : lane % 4 + 4};
}
Place b_of_tf32_k8(int lane, int i) { return {i == 0 ? lane % 4 : lane % 4 + 4, lane / 4}; }
Place a_of_tf32_k4(int lane, int i) { return {i == 0 ? lane / 4 : lane / 4 + 8, lane % 4}; }
Place b_of_tf32_k4(int lane, int) { return {lane % 4, lane / 4}; }
Place c_of(int lane, int i) { return {i < 2 ? lane / 4 : lane / 4 + 8, lane % 4 * 2 + (i & 1)}; }

struct Product {
  std::string type, sums;
  int depth;
  Place (*a)(int, int);
  Place (*b)(int, int);
};

TEST(Matrix, ProductsHaveTheManualsLayout) {
  const std::vector<Product> products = {
      {"bf16", "f32", 16, a_of_k16, b_of_k16},
      {"bf16", "f32", 8, a_of_k8, b_of_k8},
      {"f16", "f32", 16, a_of_k16, b_of_k16},
      {"f16", "f32", 8, a_of_k8, b_of_k8},
      {"f16", "f16", 16, a_of_k16, b_of_k16},
      {"f16", "f16", 8, a_of_k8, b_of_k8},
      {"tf32", "f32", 8, a_of_tf32_k8, b_of_tf32_k8},
      {"tf32", "f32", 4, a_of_tf32_k4, b_of_tf32_k4},
  };
  std::mt19937 random(7);
  for (const Product& what : products) {
    const int depth = what.depth;
    const std::string instruction = "mma.sync.aligned.m16n8k" + std::to_string(depth) +
                                    ".row.col." + what.sums + "." + what.type + "." + what.type +
                                    "." + what.sums;
    SCOPED_TRACE(instruction);
    const auto a = draw_small(16 * depth, random), b = draw_small(depth * 8, random),
               c = draw_small(16 * 8, random);
    std::vector<uint32_t> words;
    const auto num_registers = [&] { return static_cast<int>(words.size()) / kLanes; };
    append_fragments(words, a, depth, what.type, what.a, 16 * depth / kLanes);
    const int a_count = num_registers();
    append_fragments(words, b, 8, what.type, what.b, 8 * depth / kLanes);
    const int b_count = num_registers() - a_count;
    append_fragments(words, c, 8, what.sums, c_of, 4);
    const int c_count = num_registers() - a_count - b_count;
    const int at_c = 10 + a_count + b_count;
    const auto got =
        run_on_words(instruction + " {%r1,%r2" + (c_count == 4 ? ",%r3,%r4" : "") + "}, " +
                         registers(10, a_count) + ", " + registers(10 + a_count, b_count) + ", " +
                         registers(at_c, c_count) + ";\n  ",
                     words, 1, c_count);
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const Place at = c_of(lane, i);
        double expected = c[static_cast<size_t>(at.row * 8 + at.column)];
        for (int k = 0; k < depth; ++k) {
          expected += static_cast<double>(a[static_cast<size_t>(at.row * depth + k)]) *
                      b[static_cast<size_t>(k * 8 + at.column)];
        }
        const int per = what.sums == "f16" ? 2 : 1;
        const uint32_t word = got[static_cast<size_t>(i / per * kLanes + lane)];
        EXPECT_EQ(value_in(what.sums, word >> (16 * (i % per))), expected)
            << "lane " << lane << ", element " << i;
      }
    }
  }
}

// A product of matrices that each consist of one word, so that all results are the same.
float product_of(const std::string& types, int a_count, uint32_t a, uint32_t b, uint32_t c) {
  std::vector<uint32_t> words;
  for (int i = 0; i < a_count; ++i) words.insert(words.end(), kLanes, a);
  for (int i = 0; i < a_count / 2; ++i) words.insert(words.end(), kLanes, b);
  for (int i = 0; i < 4; ++i) words.insert(words.end(), kLanes, c);
  const auto got = run_on_words(
      "mma.sync.aligned." + types + " {%r1,%r2,%r3,%r4}, " + registers(10, a_count) + ", " +
          registers(10 + a_count, a_count / 2) + ", " + registers(10 + a_count * 3 / 2, 4) + ";",
      words, 1, 4);
  return kernels::float_of(got[0]);
}

TEST(Matrix, RoundingOfProducts) {
  const std::string tf32 = "m16n8k4.row.col.f32.tf32.tf32.f32";
  const std::string half = "m16n8k8.row.col.f32.f16.f16.f32";
  const std::string brain = "m16n8k8.row.col.f32.bf16.bf16.f32";
  const auto f = [](float value) { return kernels::bits_of(value); };
  // The lower 13 bits of a tf32 are ignored.
  EXPECT_EQ(product_of(tf32, 2, f(0x1.003ffep0f), f(1), 0), 4.0f);
  EXPECT_EQ(product_of(tf32, 2, f(0x1.004p0f), f(1), 0), 0x1.004p2f);
  // Sums are rounded one after the other: next to 2^25, each addend is lost.
  EXPECT_EQ(product_of(tf32, 2, f(1), f(1), f(0x1p25f)), 0x1p25f);
  EXPECT_EQ(product_of(half, 2, 0x00010001, 0x3C003C00, 0), 0x1p-21f);  // a subnormal float16
  EXPECT_EQ(kernels::bits_of(product_of(half, 2, 0x7C007C00, 0, 0)), 0x7FFFFFFFu);  // inf * 0
  EXPECT_EQ(product_of(half, 2, 0x7C007C00, 0x3C003C00, 0), HUGE_VALF);
  EXPECT_EQ(product_of(brain, 2, 0x3F803F80, 0x40004000, f(0.5f)), 16.5f);
}

// --- ldmatrix and stmatrix -----------------------------------------------------------------------

// The element of matrix i in half `part` of the lane's register i.
uint32_t element_of(int i, int lane, int part, bool is_transposed) {
  const int row = is_transposed ? 2 * (lane % 4) + part : lane / 4;
  const int column = is_transposed ? lane / 4 : 2 * (lane % 4) + part;
  return static_cast<uint32_t>(64 * i + 8 * row + column);
}

// Row r of matrix i lies at 32 (8 i + r) bytes, so rows are apart. %r4 is the lane's address, which
// is row lane % 8 of matrix lane / 8; lanes that should name no row get an invalid address.
std::string in_shared(int count) {
  return kLane + R"(
  mov.u32 %r3, tiles;
  shl.b32 %r5, %r1, 5;
  add.s32 %r4, %r3, %r5;
  setp.ge.u32 %p1, %r1, )" +
         std::to_string(8 * count) + ";\n  @%p1 mov.u32 %r4, 4;\n";
}
const std::string kTiles = ".shared .align 16 .b8 tiles[1024];";
// The row of 8 elements at the lane's address.
const std::string kStoreRow = R"(
  shl.b32 %r6, %r1, 3;
  mul.lo.u32 %r6, %r6, 0x10001;
  add.s32 %r6, %r6, 0x10000;
  add.s32 %r7, %r6, 0x20002;
  add.s32 %r8, %r6, 0x40004;
  add.s32 %r9, %r6, 0x60006;
  @!%p1 st.shared.v4.u32 [%r4], {%r6, %r7, %r8, %r9};
  bar.warp.sync -1;
)";

TEST(Matrix, LoadsEightByEightMatrices) {
  for (const int count : {1, 2, 4}) {
    for (const bool is_transposed : {false, true}) {
      const std::string instruction = "ldmatrix.sync.aligned.m8n8.x" + std::to_string(count) +
                                      (is_transposed ? ".trans" : "") + ".shared.b16 " +
                                      registers(10, count) + ", [%r4];";
      SCOPED_TRACE(instruction);
      std::string store;
      for (int i = 0; i < count; ++i) {
        store += "  st.global.u32 [%d1+" + std::to_string(128 * i) + "], %r" +
                 std::to_string(10 + i) + ";\n";
      }
      const auto got =
          testing::run({in_shared(count) + kStoreRow + instruction + store, kTiles}, 1);
      for (int i = 0; i < count; ++i) {
        for (int lane = 0; lane < kLanes; ++lane) {
          EXPECT_EQ(got[static_cast<size_t>(32 * i + lane)],
                    element_of(i, lane, 0, is_transposed) | element_of(i, lane, 1, is_transposed)
                                                                << 16)
              << i << ", lane " << lane;
        }
      }
    }
  }
}

TEST(Matrix, StoresEightByEightMatrices) {
  for (const int count : {1, 2, 4}) {
    for (const bool is_transposed : {false, true}) {
      const std::string instruction = "stmatrix.sync.aligned.m8n8.x" + std::to_string(count) +
                                      (is_transposed ? ".trans" : "") + ".shared.b16 [%r4], " +
                                      registers(10, count) + ";";
      SCOPED_TRACE(instruction);
      // Register i of a lane holds 64 i + 2 lane, and that + 1 in its upper half.
      std::string body = in_shared(count) + "  shl.b32 %r6, %r1, 1;\n";
      for (int i = 0; i < count; ++i) {
        const std::string name = "%r" + std::to_string(10 + i);
        body += "  add.s32 " + name + ", %r6, " + std::to_string(64 * i) + ";\n  mad.lo.u32 " +
                name + ", " + name + ", 0x10001, 0x10000;\n";
      }
      body += "  " + instruction + R"(
  bar.warp.sync -1;
  @%p1 bra END;
  mul.wide.u32 %d2, %r1, 16;
  add.s64 %d2, %out, %d2;
  ld.shared.v4.u32 {%r20, %r21, %r22, %r23}, [%r4];
  st.global.v4.u32 [%d2], {%r20, %r21, %r22, %r23};
END:
)";
      const auto got = testing::run({body, kTiles}, 1);
      for (int i = 0; i < count; ++i) {
        for (int j = 0; j < 64; ++j) {
          const int lane = j / 2, part = j % 2;
          const uint32_t place = element_of(i, lane, part, is_transposed);
          EXPECT_EQ(got[place / 2] >> (16 * (place % 2)) & 0xFFFFu,
                    static_cast<uint32_t>(64 * i + 2 * lane + part));
        }
      }
    }
  }
}

TEST(Matrix, MistakesAreReported) {
  using Kind = MachineError::Kind;
  const std::string whole =
      "  ldmatrix.sync.aligned.m8n8.x4.shared.b16 " + registers(10, 4) + ", [%r4];\n";
  EXPECT_EQ(failures({in_shared(4) + whole, kTiles}, Kind::kMemory, {"nobody has written"}),
            kSeeds);
  EXPECT_EQ(failures({in_shared(2) + kStoreRow + whole, kTiles}, Kind::kMemory,
                     {"outside memory", "lane 16"}),
            kSeeds);
  EXPECT_EQ(failures({in_shared(4) + kStoreRow + "  add.s32 %r4, %r4, 8;\n" + whole, kTiles},
                     Kind::kMemory, {"misaligned"}),
            kSeeds);
  const std::string product =
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r1}, {%r1}, "
      "{%f1,%f2,%f3,%f4};";
  EXPECT_EQ(failures({kLane + "  setp.eq.u32 %p1, %r1, 5;\n  @%p1 exit;\n  " + product},
                     Kind::kUndefined, {"all 32 lanes", "mma"}),
            kSeeds);
  // Another warp stores the matrices, without any ordering.
  const Case other{R"(
  mov.u32 %r2, %tid.x;
  setp.ge.u32 %p2, %r2, 32;
)" + in_shared(4) + "  @%p2 bra LOAD;\n" +
                       kStoreRow + "  bra END;\nLOAD:\n  nanosleep.u32 3000;\n" + whole + "END:\n",
                   kTiles,
                   {1, 1, 1},
                   {64, 1, 1}};
  int races = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    try {
      testing::run(other, seed);
      ADD_FAILURE() << "seed " << seed << " noticed nothing";
    } catch (const MachineError& error) {
      races += error.kind() == Kind::kRace ? 1 : 0;
    }
  }
  EXPECT_GT(races, 0);
}

TEST(Matrix, UnknownShapesAreRefused) {
  for (const char* unknown :
       {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.f16.f32 {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, "
        "{%r1,%r2}, {%r1,%r2,%r3,%r4};",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%r1,%r2,%r3,%r4}, {%r1}, {%r2}, "
        "{%r1,%r2,%r3,%r4};",
        "mma.sync.aligned.m16n8k8.row.col.f16.bf16.bf16.f16 {%r1,%r2}, {%r1,%r2}, {%r1}, "
        "{%r1,%r2};",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1,%r2}, [%r3];",
        "ldmatrix.sync.aligned.m16n16.x1.shared.b8 {%r1,%r2}, [%r3];"}) {
    Machine machine;
    EXPECT_THROW(machine.load(testing::kernel_of(unknown)), ParseError) << unknown;
  }
}

}  // namespace
}  // namespace axonn::gpu_machine
