// Keeps measurements on disk between runs, in one small TOML file per signature. A file is first
// written completely under another name and then renamed, so that a reader sees all of it or
// nothing.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace axonn::tuning {

// The platform that a measurement is valid for. Each combination of values has its own folder.
struct Platform {
  std::string machine;    // model and number of processors
  std::string torch;      // version
  std::string axonn_ext;  // version
};

struct Record {
  std::string signature;
  std::string algorithm;
  // Microseconds on the slowest rank, by algorithm, in the order in which they were offered.
  std::vector<std::pair<std::string, double>> median_us;
};

class TuningCache {
 public:
  // Files are <directory>/tuning/v<format>/<hash of platform>/<hash of signature>.toml. With an
  // empty directory, nothing is found and nothing is kept.
  TuningCache(const std::filesystem::path& directory, Platform platform);

  struct Answer {
    std::optional<Record> record;
    std::string problem;  // why a file cannot be used, or not even looked up; else empty
  };
  // A file of another signature with the same hash counts as no file.
  Answer find(const std::string& signature) const;

  // Returns what prevented writing, or an empty string. Leaves no temporary file, unless killed.
  std::string keep(const Record& record) const;

  std::filesystem::path path_of(const std::string& signature) const;

 private:
  std::filesystem::path folder_;
  Platform platform_;
};

std::string encode(const Record& record, const Platform& platform);
// Throws std::invalid_argument, saying what is wrong, if the text is not a whole record.
Record decode(const std::string& text);

}  // namespace axonn::tuning
