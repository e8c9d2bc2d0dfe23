#include "gpu_machine/runtime/ptx_files.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace axonn::gpu_machine {
namespace {

std::string text_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

const Module& module_of_file(const std::string& path) {
  static std::map<std::string, Module> parsed;
  const auto found = parsed.find(path);
  if (found != parsed.end()) return found->second;
  return parsed.emplace(path, parse_ptx(text_of_file(path))).first->second;
}

std::map<std::string, std::string> files_of_kernels(const std::string& folder) {
  constexpr std::string_view kEntry = ".entry ";
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".ptx") continue;
    const std::string text = text_of_file(entry.path());
    for (size_t at = text.find(kEntry); at != text.npos; at = text.find(kEntry, at)) {
      at += kEntry.size();
      files[text.substr(at, text.find_first_of("( \t\r\n", at) - at)] = entry.path();
    }
  }
  return files;
}

}  // namespace axonn::gpu_machine
