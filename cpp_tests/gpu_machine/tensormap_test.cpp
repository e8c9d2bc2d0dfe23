// Descriptors that a kernel changes, and steps between the elements of a box, checked against the
// manual, element by element.
#include "gpu_machine/tensor_case.h"

namespace axonn::gpu_machine::testing {
namespace {

constexpr uint64_t kSeeds = 10;
constexpr int64_t kElements = 8192;

std::vector<uint16_t> box_of(const std::vector<uint16_t>& got, size_t count) {
  const auto begin = got.begin() + kResult / 2;
  return {begin, begin + static_cast<int64_t>(count)};
}

// --- Steps ------------------------------------------------------------------------

// A box of extent 7 with steps of 3 has 3 elements, at 0, 3 and 6.
TEST(Tensormap, ABoxTakesEveryStepthElement) {
  struct StepCase {
    Tensor tensor;
    std::vector<std::vector<int64_t>> places;
  };
  const std::vector<StepCase> cases = {
      {{{40, 30}, {96}, {24, 7}, 0, 1, {1, 3}}, {{0, 0}, {20, 5}, {-8, -4}, {3, 28}}},
      {{{40, 30}, {96}, {24, 8}, 0, 1, {1, 8}}, {{0, 29}, {0, 30}, {16, 3}}},
      // TMA has no steps along the first dim, and ignores this number.
      {{{24, 5, 9}, {64, 320}, {8, 4, 5}, 0, 1, {2, 2, 4}}, {{0, 0, 0}, {17, 3, 3}, {-1, -1, -1}}},
      {{{64, 16}, {128}, {64, 16}, 3, 1, {1, 2}}, {{0, 0}}},
  };
  const std::vector<uint16_t> data = random_values(kElements, 11);
  for (const StepCase& what : cases) {
    const std::string dims = std::to_string(what.tensor.sizes.size()) + "d";
    for (const auto& at : what.places) {
      SCOPED_TRACE(dims + " " + braces(at));
      auto expected = expected_box(what.tensor, data, at);
      const std::string body = load_body(dims, braces(at), 2 * expected.size());
      if (what.tensor.swizzle != 0) {  // rows of 128 bytes: unit u of row r lies at u xor r mod 8
        const auto rows = expected;
        for (size_t i = 0; i < rows.size(); ++i) expected[i ^ (i / 64 % 8) * 8] = rows[i];
      }
      for (uint64_t seed = 0; seed < kSeeds; ++seed) {
        EXPECT_EQ(box_of(run(what.tensor, body, data, seed), expected.size()), expected);
      }
    }
  }
}

TEST(Tensormap, AStoreSkipsWhatLiesBetweenTheSteps) {
  const Tensor tensor{{8, 16}, {16}, {8, 4}, 0, 1, {1, 2}};  // rows 0 and 2 of a box
  const std::vector<uint16_t> data(128, 9);
  const std::string body = R"(
  mov.u32 %r2, buffer;
  st.shared.v4.u32 [%r2], {0x00010001, 0x00010001, 0x00010001, 0x00010001};
  st.shared.v4.u32 [%r2+16], {0x00020002, 0x00020002, 0x00020002, 0x00020002};
  fence.proxy.async.shared::cta;
  cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%out, {0, 5}], [%r2];
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
)";
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto got = run(tensor, body, data, seed);
    for (uint32_t i = 0; i < 128; ++i) {
      EXPECT_EQ(got[kData / 2 + i], i / 8 == 5 ? 1 : i / 8 == 7 ? 2 : 9) << i;
    }
  }
}

TEST(Tensormap, IllegalStepsAreRefused) {
  alignas(64) std::byte map[kTensorMapBytes];
  Tensor tensor{{64, 8}, {128}, {64, 8}};
  for (const uint32_t step : {0u, 9u, 257u}) {
    tensor.steps = {1, step};
    EXPECT_EQ(encode(map, tensor, 4096), 1) << step;
  }
  tensor.steps = {1, 8};
  EXPECT_EQ(encode(map, tensor, 4096), 0);
}

// --- tensormap.replace ------------------------------------------------------------

std::string replace(const std::string& field, const std::string& type, const std::string& values,
                    const std::string& space = "global", const std::string& at = "%out") {
  return "tensormap.replace.tile." + field + "." + space + ".b1024." + type + " [" + at + "], " +
         values + ";\n";
}
const std::string kAcquire = "fence.proxy.tensormap::generic.acquire.gpu [%out], 128;\n";

// Replaces fields to turn `from` into `to`, whose elements begin `offset` bytes further on.
struct Replacement {
  Tensor from, to;
  uint64_t offset;
  std::string code;
};

std::vector<Replacement> replacements() {
  const Tensor plain{{40, 30}, {96}, {24, 4}};
  const auto with = [&](const auto& change) {
    Tensor changed = plain;
    change(changed);
    return changed;
  };
  const std::string address = "add.s64 %d5, %out, " + std::to_string(kData + 192) + ";\n";
  return {
      {plain, plain, 192, address + replace("global_address", "b64", "%d5")},
      {plain, with([](Tensor& t) { t.sizes = {33, 28}; }), 0,
       replace("global_dim", "b32", "0, 33") + replace("global_dim", "b32", "1, 28")},
      {plain, with([](Tensor& t) { t.strides = {112}; }), 0,
       replace("global_stride", "b64", "0, 112")},
      {plain, with([](Tensor& t) { t.box = {16, 6}; }), 0,
       "mov.u32 %r9, 16;\n" + replace("box_dim", "b32", "0, %r9") +
           replace("box_dim", "b32", "1, 6")},
      {plain, with([](Tensor& t) { t.steps = {1, 2}; }), 0,
       replace("element_stride", "b32", "1, 2")},
      {{{40}, {}, {24}},
       with([](Tensor& t) { t.box = {24, 2}; }),
       0,
       replace("rank", "b32", "1") + replace("global_dim", "b32", "1, 30") +
           replace("global_stride", "b64", "0, 96") + replace("box_dim", "b32", "1, 2") +
           replace("element_stride", "b32", "1, 1")},
      {{{40, 30}, {96}, {24, 4}, 0, 6}, plain, 0, replace("elemtype", "b32", "1")},
      {{{64, 30}, {128}, {32, 4}, 3},
       {{64, 30}, {128}, {32, 4}, 0},
       0,
       replace("swizzle_mode", "b32", "0")},
  };
}

TEST(Tensormap, ReplacedFieldsCount) {
  const std::vector<uint16_t> data = random_values(kElements, 12);
  for (const Replacement& what : replacements()) {
    SCOPED_TRACE(what.code);
    const std::vector<uint16_t> moved(data.begin() + static_cast<int64_t>(what.offset / 2),
                                      data.end());
    const auto expected = expected_box(what.to, moved, {20, 25});
    const std::string body =
        what.code + kAcquire + load_body("2d", "{20, 25}", 2 * expected.size());
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      EXPECT_EQ(box_of(run(what.from, body, data, seed), expected.size()), expected);
    }
    // Without the fence, TMA may see the old descriptor.
    EXPECT_THROW(
        run(what.from, what.code + load_body("2d", "{20, 25}", 2 * expected.size()), data, 0),
        MachineError);
  }
}

// Like CUTLASS's grouped GEMMs: a warp copies a descriptor to shared memory, one lane changes it
// there, and all lanes copy it back.
std::string change_in_shared_memory(const std::string& copy, const std::string& before = "") {
  return R"(
  mov.u32 %r20, buffer;
  add.s32 %r20, %r20, 8192;
  mov.u32 %r21, %tid.x;
  setp.eq.u32 %p7, %r21, 0;
  shl.b32 %r22, %r21, 2;
  cvt.u64.u32 %d6, %r22;
  add.s64 %d6, %out, %d6;
  add.s32 %r23, %r20, %r22;
  ld.global.u32 %r24, [%d6];
  st.shared.u32 [%r23], %r24;
  bar.warp.sync 0xFFFFFFFF;
  @%p7 )" +
         replace("global_dim", "b32", "0, 33", "shared::cta", "%r20") +
         "bar.warp.sync 0xFFFFFFFF;\n" + before + copy + "@!%p7 bra END;\n";
}
const std::string kCopy =
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
    "[%out], [%r20], 128;\n";

TEST(Tensormap, ADescriptorIsChangedInSharedMemory) {
  const std::vector<uint16_t> data = random_values(kElements, 13);
  const Tensor before{{40, 30}, {96}, {24, 4}}, after{{33, 30}, {96}, {24, 4}};
  const auto expected = expected_box(after, data, {20, 0});
  const std::string load = load_body("2d", "{20, 0}", 2 * expected.size()) + "END:\n";
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_EQ(
        box_of(run(before, change_in_shared_memory(kCopy) + kAcquire + load, data, seed, {}, 32),
               expected.size()),
        expected);
    EXPECT_THROW(run(before, change_in_shared_memory(kCopy) + load, data, seed, {}, 32),
                 MachineError);
  }
  EXPECT_THROW(run(before, change_in_shared_memory(kCopy, "@%p7 add.s64 %out, %out, 128;\n") + load,
                   data, 0, {}, 32),
               MachineError);  // lanes name different descriptors
}

TEST(Tensormap, MisuseIsAnError) {
  const Tensor tensor{{40, 30}, {96}, {24, 4}};
  const std::vector<uint16_t> data = random_values(kElements, 14);
  const std::string load = load_body("2d", "{0, 0}", 192);
  for (const std::string& illegal :
       {replace("global_stride", "b64", "0, 100"), replace("box_dim", "b32", "0, 257"),
        replace("element_stride", "b32", "1, 9"), replace("global_dim", "b32", "1, 0"),
        replace("rank", "b32", "7"), replace("global_address", "b64", "8"),
        replace("rank", "b32", "2")}) {
    EXPECT_THROW(run(tensor, illegal + kAcquire + load, data, 0), MachineError) << illegal;
  }
  EXPECT_THROW(run(tensor, "st.global.u32 [%out+24], 5;" + replace("rank", "b32", "1"), data, 0),
               MachineError);  // not a descriptor
  for (const std::string& unknown :
       {replace("fill_mode", "b32", "1"), replace("interleave_layout", "b32", "1"),
        replace("elemtype", "b32", "11"), replace("swizzle_mode", "b32", "4"),
        replace("global_dim", "b32", "5, 1"), replace("global_stride", "b64", "4, 16"),
        replace("global_address", "b32", "0"), replace("swizzle_atomicity", "b32", "0")}) {
    EXPECT_THROW(run(tensor, unknown + load, data, 0), ParseError) << unknown;
  }
}

}  // namespace
}  // namespace axonn::gpu_machine::testing
