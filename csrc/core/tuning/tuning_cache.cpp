#include "core/tuning/tuning_cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <map>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "core/numeric/philox.h"
#include "core/ranks/errors.h"
#include "core/symmetric/shared_segment.h"

namespace axonn::tuning {
namespace {

using comm::FileDescriptor;
using comm::throw_errno;

// The format is part of the path, so records of another format are never read.
constexpr int kFormat = 1;
// The last line; a truncated file lacks it.
constexpr std::string_view kEnd = "complete = true\n";
constexpr size_t kMaxBytes = 64 << 10;

std::string hex(uint64_t value) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

std::string to_toml_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      std::array<char, 7> escape{};
      std::snprintf(escape.data(), escape.size(), "\\u%04X", static_cast<unsigned>(c));
      out += escape.data();
      continue;
    }
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

std::string from_toml_string(std::string_view text) {
  if (text.size() < 2 || text.front() != '"' || text.back() != '"') {
    throw std::invalid_argument("not a string: " + std::string(text));
  }
  std::string out;
  for (size_t i = 1; i + 1 < text.size(); ++i) {
    if (text[i] == '\\' && text[i + 1] == 'u') {
      int code = 0;
      std::from_chars(text.data() + i + 2, text.data() + std::min(i + 6, text.size()), code, 16);
      out += static_cast<char>(code);
      i += 5;
    } else {
      if (text[i] == '\\') ++i;
      out += text[i];
    }
  }
  return out;
}

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

std::pair<std::string, std::string> assignment(std::string_view line) {
  const auto equals = line.find('=');
  if (equals == std::string_view::npos) {
    throw std::invalid_argument("no assignment: " + std::string(line));
  }
  return {std::string(trimmed(line.substr(0, equals))),
          std::string(trimmed(line.substr(equals + 1)))};
}

double number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw std::invalid_argument("not a number: " + text);
  }
  return value;
}

// Decodes a text such as { fused = 12.500, sequential = 20.000 }.
std::vector<std::pair<std::string, double>> decode_medians(std::string_view text) {
  if (text.size() < 2 || text.front() != '{' || text.back() != '}') {
    throw std::invalid_argument("not a table: " + std::string(text));
  }
  std::vector<std::pair<std::string, double>> medians;
  auto rest = trimmed(text.substr(1, text.size() - 2));
  while (!rest.empty()) {
    const auto comma = rest.find(',');
    const auto [key, value] = assignment(rest.substr(0, comma));
    medians.emplace_back(key, number(value));
    rest = comma == std::string_view::npos ? "" : rest.substr(comma + 1);
  }
  return medians;
}

// Returns an empty string if there is no such file. Throws std::system_error if it cannot be read.
std::string read_file(const std::filesystem::path& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) {
    if (errno == ENOENT) return "";
    throw_errno("open");
  }
  std::string text(kMaxBytes, '\0');
  size_t size = 0;
  while (size < text.size()) {
    const auto count = ::read(file.get(), text.data() + size, text.size() - size);
    if (count < 0) throw_errno("read");
    if (count == 0) break;
    size += static_cast<size_t>(count);
  }
  text.resize(size);
  // An empty file is damaged, which is not the same as no file.
  return text.empty() ? "\n" : text;
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  FileDescriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (file.get() < 0) throw_errno("open(" + path.string() + ")");
  for (size_t done = 0; done < text.size();) {
    const auto count = ::write(file.get(), text.data() + done, text.size() - done);
    if (count < 0) throw_errno("write(" + path.string() + ")");
    done += static_cast<size_t>(count);
  }
}

// The file is hidden, and its name is random, so that no other writer on any host chooses it.
std::filesystem::path temporary_beside(const std::filesystem::path& path) {
  std::random_device random;
  const uint64_t word = static_cast<uint64_t>(random()) << 32 | random();
  return path.parent_path() / ("." + path.stem().string() + "." + hex(word) + ".tmp");
}

}  // namespace

std::string encode(const Record& record, const Platform& platform) {
  std::ostringstream out;
  out << "# Written by axonn_ext when it measured this op. May be deleted at any time.\n"
      << "signature = " << to_toml_string(record.signature) << '\n'
      << "algorithm = " << to_toml_string(record.algorithm) << '\n'
      << "median_us = {";
  out.setf(std::ios::fixed);
  out.precision(3);
  const char* separator = " ";
  for (const auto& [algorithm, median] : record.median_us) {
    out << separator << algorithm << " = " << median;
    separator = ", ";
  }
  out << " }\n"
      << "machine = " << to_toml_string(platform.machine) << '\n'
      << "torch = " << to_toml_string(platform.torch) << '\n'
      << "axonn_ext = " << to_toml_string(platform.axonn_ext) << '\n'
      << kEnd;
  return out.str();
}

Record decode(const std::string& text) {
  if (!text.ends_with(kEnd)) throw std::invalid_argument("its end is missing");
  std::map<std::string, std::string> values;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line.front() == '#') continue;
    values.insert(assignment(line));
  }
  for (const auto* key : {"signature", "algorithm", "median_us"}) {
    if (!values.contains(key)) throw std::invalid_argument(std::string("it has no ") + key);
  }
  return {from_toml_string(values["signature"]), from_toml_string(values["algorithm"]),
          decode_medians(values["median_us"])};
}

TuningCache::TuningCache(const std::filesystem::path& directory, Platform platform)
    : platform_(std::move(platform)) {
  if (directory.empty()) return;
  const auto key =
      kernels::hash_name(platform_.machine + '\n' + platform_.torch + '\n' + platform_.axonn_ext);
  folder_ = directory / "tuning" / ("v" + std::to_string(kFormat)) / hex(key);
}

std::filesystem::path TuningCache::path_of(const std::string& signature) const {
  return folder_ / (hex(kernels::hash_name(signature)) + ".toml");
}

TuningCache::Answer TuningCache::find(const std::string& signature) const {
  if (folder_.empty()) return {};
  const auto path = path_of(signature);
  try {
    const auto text = read_file(path);
    if (text.empty()) return {};
    auto record = decode(text);
    if (record.signature != signature) return {};
    return {std::move(record), ""};
  } catch (const std::exception& error) {
    return {std::nullopt, path.string() + ": " + error.what()};
  }
}

std::string TuningCache::keep(const Record& record) const {
  if (folder_.empty()) return "";
  const auto path = path_of(record.signature);
  const auto temporary = temporary_beside(path);
  try {
    std::filesystem::create_directories(folder_);
    write_file(temporary, encode(record, platform_));
    std::filesystem::rename(temporary, path);
    return "";
  } catch (const std::exception& error) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    return path.string() + ": " + error.what();
  }
}

}  // namespace axonn::tuning
