// The project's Triton kernels, as written for the machine by tools/triton_ptx.py: which ones there
// are, and how to launch one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gpu_machine/kernel_values.h"
#include "gpu_machine/machine.h"
#include "gpu_machine/tensor_map.h"

namespace axonn::gpu_machine::testing {

// A compiled kernel, with the facts needed to launch it.
struct TritonCase {
  std::string folder;
  std::string name;
  std::map<std::string, std::string> facts;
  std::vector<std::pair<std::string, std::string>> params;  // name and type

  const std::string& text(const std::string& fact) const { return facts.at(fact); }
  int64_t number(const std::string& fact) const { return std::stoll(facts.at(fact)); }
  bool is_true(const std::string& fact) const {
    return facts.contains(fact) && facts.at(fact) == "1";
  }
  DataType dtype() const {
    return text("dtype") == "bfloat16" ? DataType::kBFloat16 : DataType::kFloat16;
  }
};

inline std::ostream& operator<<(std::ostream& out, const TritonCase& what) {
  return out << what.name;
}

// Folders written by tools/triton_ptx.py: one kernel of each kind, and all tile sizes, which `make
// emulate-slow` compiles. Empty if triton was not found when this was built.
#ifdef AXONN_TRITON_FOLDER
inline const std::string kTritonFolder = AXONN_TRITON_FOLDER;
inline const std::string kAllTritonFolder = AXONN_TRITON_FOLDER "_all";
#else
inline const std::string kTritonFolder = "";
inline const std::string kAllTritonFolder = "";
#endif

// A name that GoogleTest accepts.
inline std::string name_of_case(const ::testing::TestParamInfo<TritonCase>& info) {
  std::string name = info.param.name;
  std::replace_if(name.begin(), name.end(), [](char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

// Empty if nothing was written.
inline std::vector<TritonCase> triton_cases(const std::string& folder = kTritonFolder) {
  std::vector<TritonCase> cases;
  std::ifstream file(folder + "/cases.txt");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string kind, name, value;
    words >> kind >> name >> value;
    if (kind == "case") cases.push_back({folder, name, {}, {}});
    if (kind == "fact") cases.back().facts[name] = value;
    if (kind == "param") cases.back().params.emplace_back(name, value);
  }
  return cases;
}

inline std::vector<TritonCase> triton_cases_of(const std::string& kernel,
                                               const std::string& folder = kTritonFolder) {
  std::vector<TritonCase> cases = triton_cases(folder);
  std::erase_if(cases, [&](const TritonCase& one) { return one.text("kernel") != kernel; });
  return cases;
}

inline std::string ptx_of(const TritonCase& what) {
  std::ifstream file(what.folder + "/" + what.text("file"));
  EXPECT_TRUE(file) << what.text("file");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The PTX with a fence after each mbarrier.init. CUDA's programming guide asks for one before TMA
// signals the mbarrier; Triton has only a barrier of the CTA there, which the machine reports.
inline std::string fenced_ptx_of(const TritonCase& what) {
  std::string ptx = ptx_of(what);
  const std::string fence = "\n\tfence.mbarrier_init.release.cluster;";
  for (size_t at = 0; (at = ptx.find("mbarrier.init.", at)) != std::string::npos;) {
    at = ptx.find(';', at) + 1;
    ptx.insert(at, fence);
  }
  return ptx;
}

// A kernel's arguments by name. Arguments without a parameter in a case are constants there.
class TritonArguments {
 public:
  TritonArguments() { values_["global_scratch"] = values_["profile_scratch"] = 0; }
  void set(const std::string& name, int64_t value) { values_[name] = static_cast<uint64_t>(value); }
  void set(const std::string& name, uint64_t value) { values_[name] = value; }

  // A tensor of these sizes whose last dim is contiguous, described as by Triton's launcher.
  void set_descriptor(const TritonCase& what, const std::string& name, uint64_t address,
                      const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
    const auto rank = static_cast<uint32_t>(sizes.size());
    const uint64_t size = static_cast<uint64_t>(kernels::size_of(what.dtype()));
    const TensorType type =
        what.dtype() == DataType::kBFloat16 ? TensorType::kBFloat16 : TensorType::kFloat16;
    std::vector<uint64_t> extents, pitches;  // from the last dim to the first
    for (size_t i = rank; i-- > 0;) {
      extents.push_back(static_cast<uint64_t>(sizes[i]));
      if (i + 1 < rank) pitches.push_back(static_cast<uint64_t>(strides[i]) * size);
      set(name + ".shape" + std::to_string(i), sizes[i]);
      set(name + ".stride" + std::to_string(i), strides[i]);
    }
    std::vector<uint32_t> box;
    std::istringstream edges(what.text(name + ".box"));
    for (std::string edge; std::getline(edges, edge, ',');) {
      box.insert(box.begin(), static_cast<uint32_t>(std::stoul(edge)));
    }
    const std::vector<uint32_t> steps(rank, 1);
    alignas(64) std::array<std::byte, kTensorMapBytes> map;
    EXPECT_EQ(encode_tiled(map.data(), static_cast<int>(type), rank, address, extents.data(),
                           pitches.data(), box.data(), steps.data(), 0,
                           static_cast<int>(what.number(name + ".swizzle")), 0, 0),
              0);
    maps_[name + ".map"].assign(map.begin(), map.end());
  }

  std::vector<std::vector<std::byte>> of(const TritonCase& what) const {
    std::vector<std::vector<std::byte>> all;
    for (const auto& [name, type] : what.params) {
      if (type == "map") {
        all.push_back(maps_.at(name));
        continue;
      }
      all.emplace_back(type == "i32" ? 4 : 8);
      std::memcpy(all.back().data(), &values_.at(name), all.back().size());
    }
    return all;
  }

 private:
  std::map<std::string, uint64_t> values_;
  std::map<std::string, std::vector<std::byte>> maps_;
};

inline void launch_triton(Machine& machine, int stream, const TritonCase& what,
                          const TritonArguments& arguments, uint32_t programs) {
  const auto threads = static_cast<uint32_t>(what.number("threads"));
  machine.enqueue(stream, machine.kernel(what.text("kernel") + "_kernel"), {programs, 1, 1},
                  {threads, 1, 1}, arguments.of(what),
                  static_cast<uint64_t>(what.number("shared")));
}

}  // namespace axonn::gpu_machine::testing
