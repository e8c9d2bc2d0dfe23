// NCCL's own rules on the runtime: what calls compute, what they wait for, and which misuse ends
// the machine.
#include <gtest/gtest.h>

#include "core/numeric/data_type.h"
#include "gpu_machine/runtime/nccl/nccl_ranks.h"

namespace axonn::gpu_machine::nccl {
namespace {

using testing::Array;
using testing::DeviceGuard;
using testing::expect_failure;
using testing::Ranks;
using testing::with_seed;
using Kind = MachineError::Kind;

std::vector<float> integers(size_t count, std::mt19937_64& random) {
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random() % 17) - 8;
  return values;
}

// Every collective, in a random order, on ranks that the adversary delays. Values are small
// integers, so sums are exact in any order.
class Collectives : public ::testing::TestWithParam<std::pair<int, size_t>> {};

TEST_P(Collectives, GiveWhatTheirNamesSay) {
  const auto [ranks, count] = GetParam();
  const auto n = static_cast<size_t>(ranks);
  for (uint64_t seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE(seed);
    Runtime runtime(with_seed(seed, ranks));
    std::mt19937_64 random(seed);
    const Ranks comms(ranks);
    const int root = static_cast<int>(random() % n);
    std::vector<std::vector<float>> inputs;
    std::vector<Array<float>> on_device, gathered, scattered, reduced, sent, sent_in_place, rooted;
    std::vector<Array<float>> exchanged;
    for (int r = 0; r < ranks; ++r) {
      const DeviceGuard guard(r);
      inputs.push_back(integers(n * count, random));
      on_device.emplace_back(inputs.back());
      gathered.emplace_back(n * count);
      scattered.emplace_back(count);
      reduced.emplace_back(n * count);
      sent.emplace_back(count);
      rooted.emplace_back(inputs.back());
      sent_in_place.emplace_back(inputs.back());
      exchanged.emplace_back(n * count);
    }
    for (int r = 0; r < ranks; ++r) {
      const auto at = static_cast<size_t>(r);
      const float* in = on_device[at].data();
      const ncclComm_t comm = comms[r];
      cudaStream_t stream = comms.stream(r);
      EXPECT_EQ(ncclAllGather(in, gathered[at].data(), count, ncclFloat32, comm, stream),
                ncclSuccess);
      EXPECT_EQ(
          ncclReduceScatter(in, scattered[at].data(), count, ncclFloat32, ncclSum, comm, stream),
          ncclSuccess);
      EXPECT_EQ(
          ncclAllReduce(in, reduced[at].data(), n * count, ncclFloat32, ncclMax, comm, stream),
          ncclSuccess);
      EXPECT_EQ(ncclBroadcast(in, sent[at].data(), count, ncclFloat32, root, comm, stream),
                ncclSuccess);
      EXPECT_EQ(ncclBcast(sent_in_place[at].data(), n * count, ncclFloat32, root, comm, stream),
                ncclSuccess);
      EXPECT_EQ(ncclReduce(rooted[at].data(), rooted[at].data(), n * count, ncclFloat32, ncclSum,
                           root, comm, stream),
                ncclSuccess);
      EXPECT_EQ(ncclGroupStart(), ncclSuccess);
      for (int peer = 0; peer < ranks; ++peer) {
        const size_t offset = static_cast<size_t>(peer) * count;
        EXPECT_EQ(ncclSend(in + offset, count, ncclFloat32, peer, comm, stream), ncclSuccess);
        EXPECT_EQ(ncclRecv(exchanged[at].data() + offset, count, ncclFloat32, peer, comm, stream),
                  ncclSuccess);
      }
      EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
      if (random() % 2 == 0) runtime.give_turns(static_cast<int>(random() % 500));
    }
    testing::synchronize(ranks);
    std::vector<float> all, sum(n * count, 0), largest(n * count, -100);
    for (const auto& input : inputs) {
      all.insert(all.end(), input.begin(), input.begin() + static_cast<int64_t>(count));
      for (size_t i = 0; i < input.size(); ++i) {
        sum[i] += input[i];
        largest[i] = std::max(largest[i], input[i]);
      }
    }
    const auto part = [&](const std::vector<float>& of, size_t begin) {
      return std::vector<float>(of.begin() + static_cast<int64_t>(begin),
                                of.begin() + static_cast<int64_t>(begin + count));
    };
    for (size_t r = 0; r < n; ++r) {
      EXPECT_EQ(gathered[r].read(), all);
      EXPECT_EQ(scattered[r].read(), part(sum, r * count));
      EXPECT_EQ(reduced[r].read(), largest);
      EXPECT_EQ(sent[r].read(), part(inputs[static_cast<size_t>(root)], 0));
      EXPECT_EQ(sent_in_place[r].read(), inputs[static_cast<size_t>(root)]);
      EXPECT_EQ(rooted[r].read(), static_cast<int>(r) == root ? sum : inputs[r]);
      std::vector<float> from_all;
      for (const auto& input : inputs) {
        const auto piece = part(input, r * count);
        from_all.insert(from_all.end(), piece.begin(), piece.end());
      }
      EXPECT_EQ(exchanged[r].read(), from_all);
    }
    for (const ncclComm_t comm : comms.comms) EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
    EXPECT_FALSE(runtime.failure()) << runtime.failure()->what();
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Collectives,
                         ::testing::Values(std::pair(1, size_t{5}), std::pair(2, size_t{1}),
                                           std::pair(2, size_t{64}), std::pair(3, size_t{17}),
                                           std::pair(4, size_t{33})));

}  // namespace
}  // namespace axonn::gpu_machine::nccl
