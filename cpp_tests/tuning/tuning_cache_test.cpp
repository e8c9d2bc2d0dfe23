// Records on disk: their format, the handling of damaged ones, and that no reader ever sees half of
// a record, no matter who writes at the same time.
#include "core/tuning/tuning_cache.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "symmetric/ranks.h"

namespace axonn::tuning {
namespace {

namespace fs = std::filesystem;
using comm::testing::error_of;
using comm::testing::expect_contains;
using comm::testing::expect_success;
using comm::testing::RankBody;
using comm::testing::run_processes;
using comm::testing::run_threads;

const Platform kPlatform{"Some CPU @ 3.00GHz, 8 cores", "2.13.0", "0.1.0"};
const std::string kSignature = "matmul_reduce_scatter a=float32[4,8]:rows scatter_dim=0 ranks=2";

// Records with different numbers have different lengths, so a mixture of two cannot look whole.
Record record(int64_t number = 0) {
  const std::vector<std::string> algorithms{"sequential", "fused", "chunked"};
  Record made{kSignature, algorithms[number % 3], {}};
  for (int64_t i = 0; i <= number % 40; ++i) {
    made.median_us.emplace_back("a" + std::to_string(i), static_cast<double>(number) + 0.125);
  }
  return made;
}

bool equal(const Record& a, const Record& b) {
  return a.signature == b.signature && a.algorithm == b.algorithm && a.median_us == b.median_us;
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (fs::temp_directory_path() / "axonn-cache-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

class TuningCacheTest : public ::testing::Test {
 protected:
  fs::path file() const { return cache_.path_of(kSignature); }
  std::string text() const {
    std::ostringstream out;
    out << std::ifstream(file()).rdbuf();
    return out.str();
  }
  void write(const std::string& text) const {
    fs::create_directories(file().parent_path());
    std::ofstream(file()) << text;
  }
  int64_t num_files() const {
    int64_t count = 0;
    for ([[maybe_unused]] const auto& entry : fs::directory_iterator(file().parent_path())) ++count;
    return count;
  }

  TemporaryFolder folder_;
  TuningCache cache_{folder_.path(), kPlatform};
};

TEST_F(TuningCacheTest, FindsWhatWasKeptAndNothingElse) {
  EXPECT_FALSE(cache_.find(kSignature).record);
  EXPECT_EQ(cache_.find(kSignature).problem, "");
  EXPECT_EQ(cache_.keep(record(5)), "");
  const auto answer = cache_.find(kSignature);
  ASSERT_TRUE(answer.record);
  EXPECT_TRUE(equal(*answer.record, record(5)));
  EXPECT_FALSE(cache_.find(kSignature + " ").record);
  EXPECT_EQ(cache_.keep(record(7)), "");
  EXPECT_TRUE(equal(*cache_.find(kSignature).record, record(7)));
  EXPECT_EQ(num_files(), 1);
}

TEST_F(TuningCacheTest, FileIsReadable) {
  ASSERT_EQ(cache_.keep({kSignature, "fused", {{"fused", 12.5}, {"sequential", 20}}}), "");
  EXPECT_EQ(text(),
            "# Written by axonn_ext when it measured this op. May be deleted at any time.\n"
            "signature = \"" +
                kSignature +
                "\"\n"
                "algorithm = \"fused\"\n"
                "median_us = { fused = 12.500, sequential = 20.000 }\n"
                "machine = \"Some CPU @ 3.00GHz, 8 cores\"\n"
                "torch = \"2.13.0\"\n"
                "axonn_ext = \"0.1.0\"\n"
                "complete = true\n");
  EXPECT_EQ(file().extension(), ".toml");
}

TEST_F(TuningCacheTest, OddCharactersSurvive) {
  const Record odd{"a \"quoted\" \\ text\twith a \x7f and = { } , #", "fused", {}};
  EXPECT_TRUE(equal(decode(encode(odd, kPlatform)), odd));
}

TEST_F(TuningCacheTest, EveryTruncationIsAProblemAndNoRecord) {
  ASSERT_EQ(cache_.keep(record(3)), "");
  const auto whole = text();
  for (size_t size = 0; size < whole.size(); ++size) {
    write(whole.substr(0, size));
    const auto answer = cache_.find(kSignature);
    ASSERT_FALSE(answer.record) << size << " of " << whole.size() << " bytes";
    expect_contains(answer.problem, {file().string()});
  }
  EXPECT_EQ(cache_.keep(record(4)), "");
  EXPECT_TRUE(equal(*cache_.find(kSignature).record, record(4)));
}

TEST(TuningRecord, DamageIsNamed) {
  const auto with = [](const std::string& lines) { return lines + "complete = true\n"; };
  const auto error = [](const std::string& text) { return error_of([&] { decode(text); }); };
  EXPECT_EQ(error(with("signature = \"s\"\nalgorithm = \"fused\"\nmedian_us = {}\n")), "");
  expect_contains(error(with("signature = \"s\"\nalgorithm = \"fused\"\n")), {"no median_us"});
  expect_contains(error(with("signature = s\nalgorithm = \"fused\"\nmedian_us = {}\n")),
                  {"not a string"});
  expect_contains(error(with("signature = \"s\"\nalgorithm = \"f\"\nmedian_us = { f = x }\n")),
                  {"not a number"});
  expect_contains(error(with("signature = \"s\"\nalgorithm = \"f\"\nmedian_us = 3\n")),
                  {"not a table"});
  expect_contains(error(with("signature\n")), {"no assignment"});
  expect_contains(error(std::string(1000, '\0')), {"end is missing"});
}

TEST_F(TuningCacheTest, HashCollisionIsAMiss) {
  auto other = record();
  other.signature = "another signature of the same hash";
  write(encode(other, kPlatform));
  const auto answer = cache_.find(kSignature);
  EXPECT_FALSE(answer.record);
  EXPECT_EQ(answer.problem, "");
}

TEST_F(TuningCacheTest, AnotherPlatformHasAnotherFolder) {
  ASSERT_EQ(cache_.keep(record()), "");
  for (const auto& platform : {Platform{"Other CPU", kPlatform.torch, kPlatform.axonn_ext},
                               Platform{kPlatform.machine, "2.14.0", kPlatform.axonn_ext},
                               Platform{kPlatform.machine, kPlatform.torch, "0.2.0"}}) {
    EXPECT_FALSE(TuningCache(folder_.path(), platform).find(kSignature).record);
  }
  EXPECT_TRUE(TuningCache(folder_.path(), kPlatform).find(kSignature).record);
}

TEST(TuningCache, NoDirectoryKeepsNothing) {
  const TuningCache cache("", kPlatform);
  EXPECT_EQ(cache.keep(record()), "");
  const auto answer = cache.find(kSignature);
  EXPECT_FALSE(answer.record);
  EXPECT_EQ(answer.problem, "");
}

// A file is in the folder's place, which stops even root.
TEST(TuningCache, UnusableDirectoryIsAProblem) {
  const TemporaryFolder folder;
  std::ofstream(folder.path() / "tuning") << "in the way";
  const TuningCache cache(folder.path(), kPlatform);
  EXPECT_NE(cache.find(kSignature).problem, "");
  expect_contains(cache.keep(record()), {cache.path_of(kSignature).string()});
}

TEST_F(TuningCacheTest, AFailedWriteLeavesNothingBehind) {
  fs::create_directories(file());  // no file can be renamed onto a folder
  EXPECT_NE(cache_.keep(record()), "");
  EXPECT_EQ(num_files(), 1);
}

TEST_F(TuningCacheTest, LeftoversOfADeadWriterAreHarmless) {
  ASSERT_EQ(cache_.keep(record(1)), "");
  const auto leftover = "." + file().stem().string() + ".0123456789abcdef.tmp";
  std::ofstream(file().parent_path() / leftover) << "signature = \"";
  EXPECT_TRUE(equal(*cache_.find(kSignature).record, record(1)));
  EXPECT_EQ(cache_.keep(record(2)), "");
  EXPECT_TRUE(equal(*cache_.find(kSignature).record, record(2)));
}

class ConcurrentTuningCacheTest : public TuningCacheTest {
 protected:
  // Even ranks write and odd ranks read: what they see must be one of the written records.
  RankBody body() {
    return [this](int64_t rank) {
      const TuningCache own(folder_.path(), kPlatform);
      for (int64_t i = 0; i < 300; ++i) {
        if (rank % 2 == 0) {
          const auto problem = own.keep(record(100 * rank + i));
          if (!problem.empty()) throw std::runtime_error(problem);
          continue;
        }
        const auto answer = own.find(kSignature);
        if (!answer.problem.empty()) throw std::runtime_error(answer.problem);
        if (!answer.record) throw std::runtime_error("the file vanished");
        const auto number = static_cast<int64_t>(answer.record->median_us.at(0).second);
        if (!equal(*answer.record, record(number))) throw std::runtime_error("a mixture");
      }
    };
  }
};

TEST_F(ConcurrentTuningCacheTest, Threads) {
  ASSERT_EQ(cache_.keep(record()), "");
  expect_success(run_threads(6, body()));
  EXPECT_EQ(num_files(), 1);
}

TEST_F(ConcurrentTuningCacheTest, Processes) {
  ASSERT_EQ(cache_.keep(record()), "");
  expect_success(run_processes(6, body()));
  EXPECT_EQ(num_files(), 1);
}

}  // namespace
}  // namespace axonn::tuning
