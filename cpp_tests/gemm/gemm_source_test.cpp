#include "core/gemm/gemm_source.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace axonn::kernels {
namespace {

GemmSources sources(int major, int minor, bool has_cutlass, bool has_triton) {
  return {major, minor, has_cutlass, has_triton};
}

TEST(GemmSource, CutlassServesSm90AndTritonAllElseFromSm80On) {
  for (const bool has_cutlass : {false, true}) {
    for (const bool has_triton : {false, true}) {
      const auto other = has_triton ? GemmSource::kTriton : GemmSource::kNone;
      EXPECT_EQ(gemm_source(sources(9, 0, has_cutlass, has_triton)),
                has_cutlass ? GemmSource::kCutlass : other);
      for (const auto& [major, minor] : {std::pair{8, 0}, {8, 6}, {8, 9}, {10, 0}, {12, 1}}) {
        EXPECT_EQ(gemm_source(sources(major, minor, has_cutlass, has_triton)), other);
      }
      EXPECT_EQ(gemm_source(sources(7, 5, has_cutlass, has_triton)), GemmSource::kNone);
    }
  }
}

TEST(GemmSource, WhatIsMissingIsNamed) {
  EXPECT_EQ(why_no_gemm_source(sources(9, 0, true, false)), "");
  EXPECT_EQ(why_no_gemm_source(sources(8, 0, false, true)), "");
  EXPECT_EQ(why_no_gemm_source(sources(7, 5, true, true)),
            "fused kernels exist from sm_80 on, and it is of sm_75");
  EXPECT_EQ(why_no_gemm_source(sources(8, 0, true, false)),
            "fused kernels for sm_80 need triton, which is not installed");
  EXPECT_EQ(why_no_gemm_source(sources(9, 0, false, false)),
            "fused kernels for sm_90 need triton, which is not installed, or axonn_ext._cuda_sm90 "
            "(CUTLASS), which is not built");
}

TEST(GemmSource, HasAName) {
  EXPECT_EQ(std::string(name_of(GemmSource::kCutlass)), "cutlass");
  EXPECT_EQ(std::string(name_of(GemmSource::kTriton)), "triton");
  EXPECT_EQ(std::string(name_of(GemmSource::kNone)), "");
}

}  // namespace
}  // namespace axonn::kernels
