// Messages between ranks in several processes: small files in an in-memory folder.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace axonn::gpu_machine::nccl {

// One communicator's folder.
class Wire {
 public:
  // The same name gives the same folder in every process.
  Wire(const std::string& folder, const std::string& communicator);

  // A file appears as a whole, or not at all.
  void put(const std::string& name, const std::vector<std::byte>& bytes) const;
  void put(const std::string& name, const std::string& text = "") const;
  bool has(const std::string& name) const;
  std::optional<std::vector<std::byte>> get(const std::string& name) const;
  std::optional<std::string> text(const std::string& name) const;
  void remove(const std::string& name) const;

 private:
  std::filesystem::path folder_;
};

// Draws the same numbers in every process for the same text.
std::mt19937_64 random_of(const std::string& text);

}  // namespace axonn::gpu_machine::nccl
