#include "gpu_machine/runtime/ptx_files.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string_view>

namespace axonn::gpu_machine {
namespace {

std::string text_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Such as .target sm_90a, whose instructions no other GPU has.
bool is_for_another(const std::string& ptx, int sm) {
  constexpr std::string_view kTarget = ".target sm_";
  const size_t at = ptx.find(kTarget);
  if (at == ptx.npos) return false;
  const size_t end = ptx.find_first_not_of("0123456789", at + kTarget.size());
  const std::string number = ptx.substr(at + kTarget.size(), end - at - kTarget.size());
  return end != ptx.npos && ptx[end] == 'a' && number != std::to_string(sm);
}

}  // namespace

const Module& module_of_file(const std::string& path) {
  static std::map<std::string, Module> parsed;
  const auto found = parsed.find(path);
  if (found != parsed.end()) return found->second;
  return parsed.emplace(path, parse_ptx(text_of_file(path))).first->second;
}

std::map<std::string, std::string> files_of_kernels(const std::string& folder, int sm) {
  constexpr std::string_view kEntry = ".entry ";
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".ptx") continue;
    const std::string text = text_of_file(entry.path());
    if (is_for_another(text, sm)) continue;
    for (size_t at = text.find(kEntry); at != text.npos; at = text.find(kEntry, at)) {
      at += kEntry.size();
      files[text.substr(at, text.find_first_of("( \t\r\n", at) - at)] = entry.path();
    }
  }
  return files;
}

}  // namespace axonn::gpu_machine
