// Boxes of tensors: TMA loads, stores and reductions, checked against the manual's rules for
// coordinates, bounds and swizzles, worked out element by element.
#include "gpu_machine/tensor_case.h"

namespace axonn::gpu_machine {
namespace {

using testing::braces;
using testing::element;
using testing::encode;
using testing::expected_box;
using testing::kBytes;
using testing::kData;
using testing::kResult;
using testing::load_body;
using testing::random_values;
using testing::run;
using testing::Tensor;

constexpr uint64_t kSeeds = 10;

// --- Loads -----------------------------------------------------------------------

struct BoxCase {
  Tensor tensor;
  std::vector<std::vector<int64_t>> places;
};

const std::vector<BoxCase> kBoxes = {
    {{{100}, {}, {16}}, {{0}, {3}, {90}, {-5}, {100}}},
    {{{40, 9}, {96}, {24, 4}}, {{0, 0}, {20, 7}, {-8, -2}, {39, 8}, {50, 0}}},
    {{{24, 5, 4}, {64, 320}, {8, 3, 2}}, {{0, 0, 0}, {17, 3, 3}, {-1, -1, -1}, {8, 1, 2}}},
    {{{16, 3, 4, 3}, {32, 96, 400}, {16, 2, 3, 2}}, {{0, 1, 1, 1}, {0, -1, 2, 2}, {1, 0, 0, 0}}},
    {{{8, 3, 2, 3, 2}, {16, 48, 96, 304}, {8, 2, 2, 2, 2}},
     {{0, 0, 0, 0, 0}, {0, 2, 1, 2, 1}, {-3, -1, 0, 1, -1}}},
};

TEST(Tensors, LoadsFillWithZerosOutside) {
  const std::vector<uint16_t> data = random_values(8192, 5);
  for (const BoxCase& box : kBoxes) {
    const std::string dims = std::to_string(box.tensor.sizes.size()) + "d";
    for (const auto& at : box.places) {
      SCOPED_TRACE(dims + " " + braces(at));
      const auto expected = expected_box(box.tensor, data, at);
      const std::string body = load_body(dims, braces(at), 2 * expected.size());
      for (uint64_t seed = 0; seed < kSeeds; ++seed) {
        const auto got = run(box.tensor, body, data, seed);
        const auto begin = got.begin() + kResult / 2;
        EXPECT_EQ(std::vector<uint16_t>(begin, begin + static_cast<int64_t>(expected.size())),
                  expected);
      }
    }
  }
}

// The manual's swizzle tables. In each line of 128 bytes, the line number permutes 16-byte units:
// all 8 by line modulo 8 (128B), each 4 by line modulo 4 (64B), each 2 by line modulo 2 (32B). The
// tables give the unit that lies at each place of lines 0 to 7.
struct SwizzleCase {
  int swizzle;
  uint32_t row_bytes;
  std::array<std::array<int, 8>, 8> unit_at;  // [line of 128 bytes][place]: the unit there
};

const std::vector<SwizzleCase> kSwizzles = {
    {3,
     128,
     {{{0, 1, 2, 3, 4, 5, 6, 7},
       {1, 0, 3, 2, 5, 4, 7, 6},
       {2, 3, 0, 1, 6, 7, 4, 5},
       {3, 2, 1, 0, 7, 6, 5, 4},
       {4, 5, 6, 7, 0, 1, 2, 3},
       {5, 4, 7, 6, 1, 0, 3, 2},
       {6, 7, 4, 5, 2, 3, 0, 1},
       {7, 6, 5, 4, 3, 2, 1, 0}}}},
    {2,
     64,
     {{{0, 1, 2, 3, 4, 5, 6, 7},
       {1, 0, 3, 2, 5, 4, 7, 6},
       {2, 3, 0, 1, 6, 7, 4, 5},
       {3, 2, 1, 0, 7, 6, 5, 4},
       {0, 1, 2, 3, 4, 5, 6, 7},
       {1, 0, 3, 2, 5, 4, 7, 6},
       {2, 3, 0, 1, 6, 7, 4, 5},
       {3, 2, 1, 0, 7, 6, 5, 4}}}},
    {1,
     32,
     {{{0, 1, 2, 3, 4, 5, 6, 7},
       {1, 0, 3, 2, 5, 4, 7, 6},
       {0, 1, 2, 3, 4, 5, 6, 7},
       {1, 0, 3, 2, 5, 4, 7, 6},
       {0, 1, 2, 3, 4, 5, 6, 7},
       {1, 0, 3, 2, 5, 4, 7, 6},
       {0, 1, 2, 3, 4, 5, 6, 7},
       {1, 0, 3, 2, 5, 4, 7, 6}}}},
};

TEST(Tensors, SwizzlesAreThoseOfTheManual) {
  const std::vector<uint16_t> data = random_values(8192, 6);
  for (const SwizzleCase& what : kSwizzles) {
    SCOPED_TRACE(what.swizzle);
    const uint32_t columns = what.row_bytes / 2, rows = 1024 / what.row_bytes;
    const Tensor tensor{{columns, rows}, {what.row_bytes}, {columns, rows}, what.swizzle};
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      const auto got = run(tensor, load_body("2d", "{0, 0}", 1024), data, seed);
      for (uint32_t line = 0; line < 8; ++line) {
        for (uint32_t unit = 0; unit < 8; ++unit) {
          const auto from = static_cast<uint32_t>(what.unit_at[line][unit]);
          for (uint32_t i = 0; i < 8; ++i) {
            EXPECT_EQ(got[kResult / 2 + 64 * line + 8 * unit + i], data[64 * line + 8 * from + i]);
          }
        }
      }
    }
  }
}

TEST(Tensors, AMulticastReachesTheCtasOfItsMask) {
  const Tensor tensor{{64}, {}, {64}};
  const std::vector<uint16_t> data = random_values(64, 7);
  const auto body = [](const std::string& last) {
    return R"(
  mov.u32 %r1, barrier;
  mov.u32 %r2, buffer;
  mbarrier.init.shared::cta.b64 [%r1], 1;
  fence.mbarrier_init.release.cluster;
  barrier.cluster.arrive.relaxed.aligned;
  barrier.cluster.wait.aligned;
  mov.u32 %r3, %cluster_ctarank;
  setp.eq.u32 %p2, %r3, 1;
  @%p2 bra END;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 128;
  setp.ne.u32 %p1, %r3, 2;
  mov.b16 %h1, 13;
  mov.b64 %d3, 0;
  @!%p1 cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%r2], [%out, {0}], [%r1], %h1, %d3;
WAIT:
  mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0;
  @!%p1 bra WAIT;
  ld.shared.u32 %r4, [%r2+64];
  mul.wide.u32 %d1, %r3, 4;
  add.s64 %d1, %out, %d1;
  st.global.u32 [%d1+65536], %r4;
END:
)" + last;
  };
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto got = run(tensor, body(""), data, seed, {4, 1, 1});
    for (const size_t rank : {0, 2, 3}) EXPECT_EQ(got[kResult / 2 + 2 * rank], data[32]);
    EXPECT_EQ(got[kResult / 2 + 2], 0);
    EXPECT_THROW(run(tensor, body(""), data, seed, {2, 1, 1}), MachineError);  // waits forever
  }
}

// --- Stores ----------------------------------------------------------------------

// Fills the buffer with 32-bit words 1, 2, ..., stores a box of it, and waits.
std::string store_body(const std::string& instruction, const std::string& fence, uint64_t bytes) {
  return R"(
  mov.u32 %r2, buffer;
  mov.u32 %r3, 0;
FILL:
  add.s32 %r4, %r2, %r3;
  shr.u32 %r5, %r3, 1;
  add.s32 %r6, %r5, 1;
  shl.b32 %r6, %r6, 16;
  or.b32 %r6, %r6, %r5;
  st.shared.u32 [%r4], %r6;
  add.s32 %r3, %r3, 4;
  setp.lt.u32 %p2, %r3, )" +
         std::to_string(bytes) + ";\n  @%p2 bra FILL;\n" + fence + "\n" + instruction + R"(
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
)";
}

TEST(Tensors, StoresLeaveOutWhatIsOutside) {
  for (const BoxCase& box : kBoxes) {
    const Tensor& tensor = box.tensor;
    const std::string dims = std::to_string(tensor.sizes.size()) + "d";
    for (const auto& at : box.places) {
      SCOPED_TRACE(dims + " " + braces(at));
      uint64_t count = 1;
      for (const uint32_t size : tensor.box) count *= size;
      const std::vector<uint16_t> data = random_values(8192, 8);
      // Puts the stored values where the box is: each element tells its place in the buffer.
      std::vector<uint16_t> expected = data;
      std::vector<int64_t> inside(at.size(), 0);
      for (uint64_t number = 0; number < count; ++number) {
        uint64_t byte = 0;
        bool is_inside = true;
        for (size_t i = 0; i < at.size(); ++i) {
          const int64_t place = at[i] + inside[i];
          is_inside &= place >= 0 && place < static_cast<int64_t>(tensor.sizes[i]);
          byte += static_cast<uint64_t>(place) * (i == 0 ? 2 : tensor.strides[i - 1]);
        }
        if (is_inside) expected[byte / 2] = static_cast<uint16_t>(number);
        for (size_t i = 0; i < at.size() && ++inside[i] == tensor.box[i]; ++i) inside[i] = 0;
      }
      const std::string body =
          store_body("cp.async.bulk.tensor." + dims + ".global.shared::cta.bulk_group [%out, " +
                         braces(at) + "], [%r2];",
                     "fence.proxy.async.shared::cta;", 2 * count);
      for (uint64_t seed = 0; seed < kSeeds; ++seed) {
        const auto got = run(tensor, body, data, seed);
        const auto begin = got.begin() + kData / 2;
        EXPECT_EQ(std::vector<uint16_t>(begin, begin + 8192), expected);
      }
    }
  }
}

TEST(Tensors, ReductionsAddToTheTensor) {
  Tensor tensor{{8, 3}, {16}, {8, 2}};
  tensor.type = 3;  // int32: 8 elements are 32 bytes
  tensor.strides = {32};
  const std::vector<uint16_t> data(96, 2);  // int32 0x00020002
  const std::string body = store_body(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%out, {4, 2}], "
      "[%r2];",
      "fence.proxy.async.shared::cta;", 64);
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto got = run(tensor, body, data, seed);
    // Row 2 gets words 0 to 3 of the buffer from column 4 on: 16-bit values 0, 1, 2, ...
    for (uint32_t i = 0; i < 48; ++i) {
      const uint32_t expected = i < 40 ? 2 : 2 + (i - 40);
      EXPECT_EQ(got[kData / 2 + i], expected) << i;
    }
  }
}

TEST(Tensors, AFenceLeftOutIsFound) {
  const Tensor tensor{{64}, {}, {64}};
  const std::string instruction =
      "cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%out, {0}], [%r2];";
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_THROW(run(tensor, store_body(instruction, "", 128), {}, seed), MachineError);
    EXPECT_THROW(run(tensor, store_body(instruction, "bar.sync 0;", 128), {}, seed), MachineError);
  }
}

// --- Descriptors -----------------------------------------------------------------

TEST(Tensors, IllegalDescriptorsAreRefused) {
  alignas(64) std::byte map[kTensorMapBytes];
  const Tensor right{{64, 8}, {128}, {64, 8}, 3};
  EXPECT_EQ(encode(map, right, 4096), 0);
  EXPECT_EQ(encode(map, right, 4104), 1);  // the base is not a multiple of 16
  const std::vector<Tensor> wrong = {
      {{64, 8}, {136}, {64, 8}, 3},  // a stride is not a multiple of 16
      {{64, 8}, {uint64_t{1} << 40}, {64, 8}, 3},
      {{64, 8}, {128}, {128, 8}, 3},  // 256 bytes are more than the swizzle spans
      {{64, 8}, {128}, {64, 257}, 3},
      {{64, 8}, {128}, {64, 0}, 3},
      {{64, 0}, {128}, {64, 8}, 3},
      {{64, 8}, {128}, {12, 8}, 0},  // 24 bytes are not a multiple of 16
      {{64, 8}, {128}, {64, 8}, 4},  // there is no such swizzle
      {{8, 2, 2, 2, 2, 2}, {16, 32, 64, 128, 256}, {8, 1, 1, 1, 1, 1}},
  };
  for (size_t i = 0; i < wrong.size(); ++i) EXPECT_EQ(encode(map, wrong[i], 4096), 1) << i;
  EXPECT_EQ(encode(map + 16, right, 4096), 1);  // it must lie at a multiple of 64 bytes
  Tensor unknown = right;
  unknown.type = 11;  // tf32
  EXPECT_THROW(encode(map, unknown, 4096), std::invalid_argument);
}

TEST(Tensors, WrongDescriptorsAreErrors) {
  const Tensor tensor{{64}, {}, {64}};
  const std::vector<uint16_t> data = random_values(64, 9);
  // A wrong number of dims; a descriptor that was overwritten.
  EXPECT_THROW(run(tensor, load_body("2d", "{0, 0}", 128), data, 0), MachineError);
  EXPECT_THROW(run(tensor,
                   "st.global.u32 [%out+24], 5; fence.proxy.tensormap::generic.acquire.cta "
                   "[%out], 128;\n" +
                       load_body("1d", "{0}", 128),
                   data, 0),
               MachineError);
  // A kernel's writes to a descriptor need a fence, even if they do not change it.
  const std::string rewrite = "ld.global.u32 %r9, [%out]; st.global.u32 [%out], %r9;\n";
  const std::string fence = "fence.proxy.tensormap::generic.acquire.gpu [%out], 128;\n";
  EXPECT_NO_THROW(run(tensor, rewrite + fence + load_body("1d", "{0}", 128), data, 0));
  try {
    run(tensor, rewrite + load_body("1d", "{0}", 128), data, 0);
    ADD_FAILURE() << "it was not noticed";
  } catch (const MachineError& error) {
    EXPECT_NE(std::string(error.what()).find("fence.proxy.tensormap"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace axonn::gpu_machine
