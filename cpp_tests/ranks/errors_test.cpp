#include "core/ranks/errors.h"

#include <gtest/gtest.h>

namespace axonn::comm {
namespace {

TEST(Errors, ValuesThatDifferAreShownWithThisRanks) {
  EXPECT_EQ(described_next_to("op x=float32[4,16] dim=0", "op x=float32[6,16] dim=0"),
            "op x=float32[4,16] (here x=float32[6,16]) dim=0");
}

TEST(Errors, ValuesOfOneCallOnlyAreMarked) {
  EXPECT_EQ(described_next_to("op dim=0 bias=1", "op dim=0 requires_grad=a,b"),
            "op dim=0 bias=1 (not here) (here also requires_grad=a,b)");
}

TEST(Errors, AnotherOpIsShownAsItIs) {
  EXPECT_EQ(described_next_to("gather dim=0", "sum dim=1"), "gather dim=0");
}

TEST(Errors, ACutDescriptionIsShown) {
  EXPECT_EQ(described_next_to("op dim=0 very_lo#12", "op dim=0 very_lo#34"),
            "op dim=0 very_lo#12 (not here) (here also very_lo#34)");
}

}  // namespace
}  // namespace axonn::comm
