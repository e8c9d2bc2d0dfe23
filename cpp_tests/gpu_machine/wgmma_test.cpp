// Products of warpgroups, in every layout of their operands, against sums in double. The layouts
// are those of the PTX manual (ISA 9.0, section 9.7.15.5.1), restated element by element.
#include "gpu_machine/wgmma_case.h"

namespace axonn::gpu_machine {
namespace {

using testing::bytes_in;
using testing::Place;
using testing::registers;
using Kind = MachineError::Kind;

using testing::check;
using testing::kernel_text;
using testing::Layout;
using testing::Multiplication;
using testing::Operands;
using testing::operands_of;
using testing::run;

TEST(Wgmma, EveryLayoutOfOperands) {
  for (const int row_bytes : {16, 32, 64, 128}) {
    for (const bool a_along_k : {true, false}) {
      for (const bool b_along_k : {true, false}) {
        SCOPED_TRACE(std::to_string(row_bytes) + (a_along_k ? " K" : " M") +
                     (b_along_k ? " K" : " N"));
        Multiplication what;
        what.a = {row_bytes, a_along_k};
        what.b = {row_bytes, b_along_k};
        what.columns = 128;
        check(what, 1);
        what.type = "f16";
        what.columns = 64;
        check(what, 2);
      }
    }
  }
}

TEST(Wgmma, TypesShapesAndSigns) {
  for (const int columns : {8, 24, 96, 256}) {
    for (const std::string type : {"bf16", "f16", "tf32"}) {
      SCOPED_TRACE(type + " " + std::to_string(columns));
      Multiplication what;
      what.type = type;
      what.columns = columns;
      check(what, 1);
      what.sign_a = -1;
      check(what, 2);
      what.sign_b = -1;
      what.a_in_registers = true;
      check(what, 3);
      what.adds = false;
      what.sign_a = 1;
      check(what, 4);
      if (type != "f16") continue;
      what.sums = "f16";
      check(what, 5);
      what.adds = true;
      what.a_in_registers = false;
      check(what, 6);
    }
  }
}

TEST(Wgmma, MatricesBeginWithinAPattern) {
  for (const std::string type : {"bf16", "tf32"}) {
    for (const int row_bytes : {64, 128}) {
      Multiplication what;
      what.type = type;
      what.a = {row_bytes, true, what.depth()};
      what.b = {row_bytes, true, row_bytes == 128 ? 3 * what.depth() : 0};
      check(what, 1);
      what.a.base = row_bytes == 128 ? 5 : 3;
      what.b.base = row_bytes == 128 ? 2 : 1;
      check(what, 2);
    }
  }
}

TEST(Wgmma, ProductsOfOneShapeFollowEachOther) {
  Multiplication what;
  what.instructions = 3;
  what.columns = 32;
  for (uint64_t seed = 0; seed < 10; ++seed) check(what, seed);
}

// Returns how often this kind of error is reported, and checks its message.
int failures(const Multiplication& what, Kind kind, const std::string& name) {
  std::mt19937 random(3);
  const Operands operands = operands_of(what, random);
  int count = 0;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    try {
      run(what, operands, seed);
    } catch (const MachineError& error) {
      EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind)) << error.what();
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
      ++count;
    }
  }
  return count;
}

TEST(Wgmma, WhatIsLeftOutIsReported) {
  const Multiplication whole;
  EXPECT_EQ(failures(whole, Kind::kUndefined, ""), 0);

  Multiplication what = whole;
  what.fence = "";
  EXPECT_EQ(failures(what, Kind::kUndefined, "no wgmma.fence"), 5);
  what.fence = "wgmma.fence.sync.aligned; add.u32 %s3, %s3, 0;";
  EXPECT_EQ(failures(what, Kind::kUndefined, "no wgmma.fence"), 5);

  // A move does not count as a use: ptxas chooses registers, and Triton leaves moves there.
  what.fence = "wgmma.fence.sync.aligned; mov.b32 %s3, %s4;";
  EXPECT_EQ(failures(what, Kind::kUndefined, ""), 0);

  what = whole;
  what.before = "";
  EXPECT_EQ(failures(what, Kind::kRace, "proxy"), 5);

  what = whole;
  what.wait = "";
  EXPECT_EQ(failures(what, Kind::kUndefined, "not waited for"), 5);
  what.wait = "wgmma.wait_group.sync.aligned 1;";
  EXPECT_EQ(failures(what, Kind::kUndefined, "not waited for"), 5);

  what = whole;
  what.behind_issue = "mov.b32 %r9, %s0;";
  EXPECT_EQ(failures(what, Kind::kUndefined, "not waited for"), 5);
  what.a_in_registers = true;
  what.behind_issue = "mov.b32 %s8, 0;";  // a register of A
  EXPECT_EQ(failures(what, Kind::kUndefined, "not waited for"), 5);
}

TEST(Wgmma, OperandsThatAreOverwrittenAreReported) {
  Multiplication what;
  what.behind_issue = "st.shared.u32 [tiles], 0;";
  EXPECT_EQ(failures(what, Kind::kRace, "race"), 5);
  what.behind_issue = "";
  what.behind_wait = "bar.sync 0; setp.eq.u32 %p3, %r1, 0; @%p3 st.shared.u32 [tiles], 0;";
  EXPECT_EQ(failures(what, Kind::kRace, ""), 0);
  // Other warps may still be waiting, but if the product has ended for one, it has for all.
  what.behind_wait = "setp.eq.u32 %p3, %r1, 0; @%p3 st.shared.u32 [tiles], 0;";
  EXPECT_EQ(failures(what, Kind::kRace, ""), 0);
}

TEST(Wgmma, DescriptorsAndOperandsAreChecked) {
  for (const int bit : {14, 31, 48, 55}) {
    Multiplication what;
    what.spoiled_bits = uint64_t{1} << bit;
    EXPECT_EQ(failures(what, Kind::kUndefined, "matrix descriptor"), 5) << bit;
  }
  Multiplication what;
  what.spoiled_bits = uint64_t{1} << 49;  // a base that does not fit the start
  EXPECT_EQ(failures(what, Kind::kUndefined, "matrix descriptor"), 5);
  what.spoiled_bits = uint64_t{0x3000} << 32;
  EXPECT_EQ(failures(what, Kind::kMemory, "outside shared memory"), 5);
  what.spoiled_bits = 0;
  what.before += " shr.u32 %r9, %r1, 5;";
  what.fence = "setp.eq.u32 %p4, %r9, 2; @%p4 add.s64 %d7, %d7, 64; wgmma.fence.sync.aligned;";
  EXPECT_EQ(failures(what, Kind::kUndefined, "different operands"), 5);
  what.fence = "setp.eq.u32 %p4, %r1, 2; @%p4 add.s64 %d7, %d7, 64; wgmma.fence.sync.aligned;";
  EXPECT_EQ(failures(what, Kind::kUndefined, "different descriptors"), 5);
}

TEST(Wgmma, UnknownFormsAreRefused) {
  const std::string d = "{%r1,%r2,%r3,%r4}";
  for (const std::string& unknown :
       {"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.f16 " + d + ", %d1, %d2, %p1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 " + d +
            ", %d1, %d2, %p1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k8.f32.bf16.bf16 " + d + ", %d1, %d2, %p1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 " + d +
            ", %d1, %d2, %p1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 " + d + ", %d1, %d2, %p1, 2, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 " + d + ", %d1, %d2, %p1, 1, 1, 0, 0;",
        std::string("wgmma.wait_group.sync.aligned 8;"), std::string("wgmma.fence.sync;")}) {
    Machine machine;
    EXPECT_THROW(machine.load(testing::kernel_of(unknown)), ParseError) << unknown;
  }
}

}  // namespace
}  // namespace axonn::gpu_machine
