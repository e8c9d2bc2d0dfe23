#include "gpu_machine/runtime/nccl/wire.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace axonn::gpu_machine::nccl {
namespace {

// FNV-1a, which gives the same value everywhere.
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const char letter : text) hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001B3;
  return hash;
}

}  // namespace

std::mt19937_64 random_of(const std::string& text) { return std::mt19937_64(hash_of(text)); }

Wire::Wire(const std::string& folder, const std::string& communicator)
    : folder_(std::filesystem::path(folder) / std::to_string(hash_of(communicator))) {
  std::filesystem::create_directories(folder_);
}

void Wire::put(const std::string& name, const std::vector<std::byte>& bytes) const {
  static std::atomic<int> count = 0;
  const auto unfinished =
      folder_ / (std::to_string(getpid()) + "." + std::to_string(++count) + ".unfinished");
  std::ofstream file(unfinished, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) throw std::runtime_error("cannot write " + unfinished.string());
  std::filesystem::rename(unfinished, folder_ / name);
}

void Wire::put(const std::string& name, const std::string& text) const {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  put(name, std::vector<std::byte>(begin, begin + text.size()));
}

bool Wire::has(const std::string& name) const {
  return access((folder_ / name).c_str(), F_OK) == 0;
}

std::optional<std::vector<std::byte>> Wire::get(const std::string& name) const {
  const auto read = text(name);
  if (!read) return std::nullopt;
  const auto* begin = reinterpret_cast<const std::byte*>(read->data());
  return std::vector<std::byte>(begin, begin + read->size());
}

std::optional<std::string> Wire::text(const std::string& name) const {
  std::ifstream file(folder_ / name, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

void Wire::remove(const std::string& name) const { std::filesystem::remove(folder_ / name); }

}  // namespace axonn::gpu_machine::nccl
