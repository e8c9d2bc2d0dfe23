#include "core/numeric/block_layout.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace axonn::kernels {
namespace {

using Sizes = std::vector<int64_t>;

BlockLayout layout_of(const Sizes& full, const Sizes& offsets, const Sizes& sizes) {
  return BlockLayout::of(full.data(), offsets.data(), sizes.data(),
                         static_cast<int64_t>(full.size()));
}

// Index in the whole tensor of each element of the block, from the layout.
Sizes by_layout(const BlockLayout& layout) {
  Sizes indices;
  for (int64_t row = 0; row < layout.rows && layout.columns > 0; ++row) {
    for (int64_t c = 0; c < layout.columns; ++c) indices.push_back(layout.row_start(row) + c);
  }
  return indices;
}

// The same, from the definition.
Sizes by_definition(const Sizes& full, const Sizes& offsets, const Sizes& sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  Sizes indices;
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, index = 0, stride = 1;
    for (size_t d = full.size(); d-- > 0;) {
      index += (offsets[d] + rest % sizes[d]) * stride;
      rest /= sizes[d];
      stride *= full[d];
    }
    indices.push_back(index);
  }
  return indices;
}

TEST(BlockLayout, FindsEveryElementOfEveryBlock) {
  const Sizes full{3, 4, 2, 3};
  Sizes offsets(4), sizes(4);
  for (int64_t code = 0; code < 3 * 4 * 2 * 3 * 3 * 4 * 2 * 3; ++code) {
    int64_t rest = code;
    bool fits = true;
    for (size_t d = 0; d < 4; ++d) {
      offsets[d] = rest % full[d];
      rest /= full[d];
      sizes[d] = rest % full[d] + 1;
      rest /= full[d];
      fits = fits && offsets[d] + sizes[d] <= full[d];
    }
    if (!fits) continue;
    ASSERT_EQ(by_layout(layout_of(full, offsets, sizes)), by_definition(full, offsets, sizes));
  }
}

TEST(BlockLayout, WholeDimsAreOneRow) {
  const auto whole = layout_of({5, 4, 3}, {0, 0, 0}, {5, 4, 3});
  EXPECT_EQ(whole.rows, 1);
  EXPECT_EQ(whole.columns, 60);
  const auto rows = layout_of({8, 4, 3}, {2, 0, 0}, {5, 4, 3});
  EXPECT_EQ(rows.rows, 1);
  EXPECT_EQ(rows.first, 24);
  EXPECT_EQ(rows.columns, 60);
}

TEST(BlockLayout, EmptyBlocks) {
  EXPECT_TRUE(by_layout(layout_of({4, 3}, {1, 0}, {0, 3})).empty());
  EXPECT_TRUE(by_layout(layout_of({4, 3}, {1, 1}, {2, 0})).empty());
}

TEST(BlockLayout, TooManyCutDimsAreRefused) {
  const Sizes full(10, 3), offsets(10, 0), sizes(10, 2);
  EXPECT_THROW(layout_of(full, offsets, sizes), std::invalid_argument);
}

}  // namespace
}  // namespace axonn::kernels
