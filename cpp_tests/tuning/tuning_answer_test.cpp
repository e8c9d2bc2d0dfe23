#include "core/tuning/tuning_answer.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace axonn::tuning {
namespace {

using Verdict = Answer::Verdict;

void expect_equal(const Answer& a, const Answer& b) {
  EXPECT_EQ(a.asked, b.asked);
  EXPECT_EQ(a.kept_under, b.kept_under);
  EXPECT_EQ(a.verdict, b.verdict);
  EXPECT_EQ(a.algorithm, b.algorithm);
  EXPECT_EQ(a.candidates, b.candidates);
  EXPECT_EQ(a.median_us, b.median_us);
}

TEST(TuningAnswer, TravelsAsText) {
  const Answer kept{.asked = "mm_forward a=float32[4,8]",
                    .kept_under = "mm_forward a=float32[4,8] layouts=rows,columns threads=1",
                    .verdict = Verdict::kDisk,
                    .algorithm = "transposed",
                    .candidates = {},
                    .median_us = {{"direct", 12.345678901234567}, {"transposed", 0.1}}};
  expect_equal(decode_answer(encode(kept)), kept);
  auto measure = kept;
  measure.verdict = Verdict::kMeasure;
  measure.candidates = {"direct", "cublaslt_1_2_3", "triton_m64"};
  measure.median_us = {};
  expect_equal(decode_answer(encode(measure)), measure);
  auto unknown = measure;
  unknown.verdict = Verdict::kDefault;
  unknown.candidates = {};
  expect_equal(decode_answer(encode(unknown)), unknown);
}

TEST(TuningAnswer, WhatIsCutShortOrUnknownIsRefused) {
  EXPECT_THROW(decode_answer(""), std::invalid_argument);
  EXPECT_THROW(decode_answer("a\nb\nmeasure\ndirect\n"), std::invalid_argument);
  EXPECT_THROW(decode_answer("a\nb\nguess\ndirect\n\n\n"), std::invalid_argument);
}

}  // namespace
}  // namespace axonn::tuning
