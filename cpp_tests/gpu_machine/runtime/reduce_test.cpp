// The sums of csrc/core/cuda/reduce.cu, from their launcher to the bits of the result.
#include "core/cuda/reduce.h"

#include <gtest/gtest.h>

#include "core/cuda/check.h"
#include "core/numeric/reduce.h"
#include "gpu_machine/kernel_values.h"
#include "gpu_machine/runtime/runtime.h"

namespace axonn::gpu_machine {
namespace {

using kernels::DataType;
using kernels::ReduceOp;

struct Case {
  DataType dtype;
  ReduceOp op;
  int64_t num_sources;
  size_t count;
  size_t offset;  // of every matrix, in elements: 16-byte vectors must be aligned
};

void check(const Case& c, std::mt19937_64& random) {
  const auto size = static_cast<size_t>(kernels::size_of(c.dtype));
  std::vector<std::vector<std::byte>> values;
  std::vector<const void*> on_host, on_device;
  for (int64_t s = 0; s < c.num_sources; ++s) {
    values.push_back(testing::draw(c.count, c.dtype, random, 3));
    on_host.push_back(values.back().data());
    void* memory = nullptr;
    AXONN_CUDA_CHECK(cudaMalloc(&memory, (c.count + c.offset) * size));
    auto* source = static_cast<std::byte*>(memory) + c.offset * size;
    AXONN_CUDA_CHECK(cudaMemcpy(source, on_host.back(), c.count * size, cudaMemcpyDefault));
    on_device.push_back(source);
  }
  auto* out = static_cast<std::byte*>(const_cast<void*>(on_device[0]));  // in place
  AXONN_CUDA_CHECK(kernels::cuda::reduce_slots(
      out, on_device.data(), c.num_sources, static_cast<int64_t>(c.count), c.dtype, c.op, nullptr));
  std::vector<std::byte> got(c.count * size), want(c.count * size);
  AXONN_CUDA_CHECK(cudaMemcpy(got.data(), out, c.count * size, cudaMemcpyDefault));
  kernels::reduce_slots(want.data(), on_host.data(), c.num_sources, static_cast<int64_t>(c.count),
                        c.dtype, c.op);
  EXPECT_EQ(got, want) << "dtype " << static_cast<int>(c.dtype) << ", op " << static_cast<int>(c.op)
                       << ", " << c.num_sources << " sources of " << c.count << " elements at "
                       << c.offset;
}

TEST(Reduce, SumsAndMaximaHaveTheCpusBits) {
  std::mt19937_64 random(7);
  for (const auto dtype : {DataType::kFloat32, DataType::kFloat64, DataType::kBFloat16,
                           DataType::kFloat16, DataType::kInt64}) {
    // Each dtype has its own runtime, because every allocation takes a window of addresses.
    Runtime runtime;
    for (const auto op : {ReduceOp::kSum, ReduceOp::kMax}) {
      for (const int64_t num_sources : {1, 3, 9}) {
        for (const size_t count : {size_t{1}, size_t{7}, size_t{8}, size_t{1003}}) {
          for (const size_t offset : {size_t{0}, size_t{1}}) {
            check({dtype, op, num_sources, count, offset}, random);
          }
        }
      }
    }
  }
}

TEST(Reduce, NothingIsLaunchedForNoElements) {
  Runtime runtime;
  const void* none[] = {nullptr};
  EXPECT_EQ(
      kernels::cuda::reduce_slots(nullptr, none, 1, 0, DataType::kFloat32, ReduceOp::kSum, nullptr),
      cudaSuccess);
  EXPECT_EQ(runtime.calls_of("cudaLaunchKernel"), 0);
  EXPECT_EQ(
      kernels::cuda::reduce_slots(nullptr, none, 0, 1, DataType::kFloat32, ReduceOp::kSum, nullptr),
      cudaErrorInvalidValue);
}

}  // namespace
}  // namespace axonn::gpu_machine
