// What was measured for a signature, kept on disk between runs: one small TOML file each, written
// whole under another name and renamed, so that a reader sees all of it or nothing.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace axonn::tuning {

// What a measurement holds for. Another value of any of them is another folder of the cache.
struct Platform {
  std::string machine;    // model and number of processors
  std::string torch;      // version
  std::string axonn_ext;  // version
};

struct Record {
  std::string signature;
  std::string algorithm;
  // By algorithm, in the order in which they were legal: microseconds of the slowest rank.
  std::vector<std::pair<std::string, double>> median_us;
};

class TuningCache {
 public:
  // Files are <directory>/tuning/v<format>/<hash of platform>/<hash of signature>.toml.
  // An empty directory: nothing is found and nothing is kept.
  TuningCache(const std::filesystem::path& directory, Platform platform);

  struct Answer {
    std::optional<Record> record;
    std::string problem;  // why a file that is there is of no use, or cannot be seen; else empty
  };
  // A file of another signature with the same hash counts as none.
  Answer find(const std::string& signature) const;

  // Returns what stood in the way, or an empty string. Leaves no temporary file, unless killed.
  std::string keep(const Record& record) const;

  std::filesystem::path path_of(const std::string& signature) const;

 private:
  std::filesystem::path folder_;
  Platform platform_;
};

std::string encode(const Record& record, const Platform& platform);
// Throws std::invalid_argument, saying what is wrong, for anything but a whole record.
Record decode(const std::string& text);

}  // namespace axonn::tuning
