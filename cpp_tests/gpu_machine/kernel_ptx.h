// The PTX of the project's CUDA kernels, which the build generates if there is an nvcc.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

namespace axonn::gpu_machine::testing {

// A test of kernels; skipped if there is no PTX.
class KernelTest : public ::testing::Test {
 protected:
  void SetUp() override {
#ifndef AXONN_PTX_FOLDER
    GTEST_SKIP() << "nvcc was not found, so there is no PTX of the kernels to run";
#endif
  }

  // The PTX of a file in csrc/core/cuda.
  static std::string ptx(const std::string& name) {
#ifdef AXONN_PTX_FOLDER
    const std::string path = std::string(AXONN_PTX_FOLDER) + "/" + name + ".ptx";
    std::ifstream file(path);
    EXPECT_TRUE(file) << path;
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
#else
    return name;
#endif
  }
};

}  // namespace axonn::gpu_machine::testing
