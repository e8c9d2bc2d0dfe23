// The all-to-all with which the overlap code sums gradients, on NCCL in software.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <vector>

#include "core/cuda/nccl/communicator.h"
#include "gpu_machine/runtime/nccl/nccl_ranks.h"
#include "ranks/in_memory_store.h"

namespace axonn::gpu_machine::nccl {
namespace {

using testing::Array;
using testing::HighPriorityStream;
using testing::on_threads;
using testing::with_threads;

// Block r of rank s goes to block s of rank r, for s = r as well, in call after call.
TEST(Communicators, AnAllToAllMovesEveryBlock) {
  for (const int size : {2, 3, 4}) {
    for (uint64_t seed = 0; seed < 3; ++seed) {
      Runtime runtime(with_threads(seed, size));
      const auto store = std::make_shared<comm::testing::InMemoryStore>();
      on_threads(size, [&](int rank) {
        comm::AxisRanks axis{"z", {}};
        for (int i = 0; i < size; ++i) axis.ranks.push_back(i);
        comm::CommunicatorOptions options;
        options.device = rank;
        options.max_ctas = 2;
        options.timeout = std::chrono::duration<double>(20);
        comm::CommunicatorGrid grid(options, rank, size, {axis}, "grid", store, store);
        const HighPriorityStream stream;
        const auto n = static_cast<size_t>(size);
        std::vector<float> sent(3 * n), expected(3 * n);
        for (size_t i = 0; i < sent.size(); ++i) {
          sent[i] = static_cast<float>(100 * rank + static_cast<int>(i));
          expected[i] = static_cast<float>(100 * static_cast<int>(i / 3) + 3 * rank +
                                           static_cast<int>(i % 3));
        }
        const Array<float> input(sent), output(3 * n), again(3 * n);
        auto& z = grid.axis("z");
        constexpr auto kFloat32 = kernels::DataType::kFloat32;
        z.all_to_all(input.data(), output.data(), 3, kFloat32, stream.get()).block(stream.get());
        z.all_to_all(output.data(), again.data(), 3, kFloat32, stream.get()).block(stream.get());
        AXONN_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
        EXPECT_EQ(output.read(), expected);
        EXPECT_EQ(again.read(), sent);
        grid.close();
      });
      EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
    }
  }
}

}  // namespace
}  // namespace axonn::gpu_machine::nccl
