#include "model/times_tables.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <stdexcept>

namespace axonn::times {
namespace {

TEST(Tables, AreThoseOfThePage) {
  std::stringstream page;
  page << std::ifstream("docs/kernel_model.md").rdbuf();
  EXPECT_TRUE(with_tables(page.str(), /*slow_ones=*/false) == page.str())
      << "docs/kernel_model.md: expected the tables of the model as it is; `make docs` writes them";
}

TEST(Tables, APageWithoutMarksIsRefused) {
  EXPECT_THROW(with_tables("# A page\n", /*slow_ones=*/false), std::invalid_argument);
}

}  // namespace
}  // namespace axonn::times
