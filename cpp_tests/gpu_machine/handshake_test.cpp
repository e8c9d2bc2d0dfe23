// The handshake of fused calls, on two virtual ranks that run concurrently.
#include "core/cuda/fused/handshake.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "gpu_machine/kernel_ptx.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {
namespace {

using comm::kSignalStride;
using kernels::cuda::kDoneFlags;
using kernels::cuda::Peers;
using kernels::cuda::SpinFailure;

constexpr int kRanks = 2;
constexpr uint64_t kShardBytes = 96;
constexpr comm::SignalLayout kLayout{1, kRanks, 1};

enum class Delivery { kFlagsByCopies, kFlagsByKernel };

struct Setup {
  uint64_t seed = 0;
  uint32_t epoch = 0;  // number of calls made before
  uint64_t budget_ns = 1'000'000'000;
  Delivery delivery = Delivery::kFlagsByCopies;
};

// Replaces every occurrence of a text in the PTX; there must be at least one.
std::string replaced(std::string ptx, const std::string& from, const std::string& to) {
  size_t count = 0;
  for (size_t at = 0; (at = ptx.find(from, at)) != std::string::npos; at += to.size(), ++count) {
    ptx.replace(at, from.size(), to);
  }
  EXPECT_GT(count, 0u) << from;
  return ptx;
}

// Ranks that gather their shards in call after call, enqueued as in fused_calls.cpp.
class Ranks {
 public:
  Ranks(const std::string& ptx, const Setup& setup) : setup_(setup), machine_({setup.seed}) {
    machine_.load(ptx);
    for (size_t r = 0; r < kRanks; ++r) {
      const std::string rank = " of rank " + std::to_string(r);
      streams_[r] = machine_.new_stream(static_cast<int>(r));
      workspaces_[r] = machine_.memory().allocate(kRanks * kShardBytes, "workspace" + rank);
      // A flag holds the epoch of the last call that raised it.
      pads_[r] = machine_.put(std::vector<uint32_t>(kernels::cuda::kPadBytes / 4, setup.epoch),
                              "pad" + rank);
      epochs_[r] = machine_.put(std::vector<uint32_t>{setup.epoch}, "epoch" + rank);
      to_push_[r] = machine_.put(std::vector<uint32_t>{setup.epoch}, "epoch to push" + rank);
      failures_[r] = machine_.put(std::vector<SpinFailure>(1), "record" + rank);
    }
  }

  void call(size_t rank, uint32_t number) {
    const int stream = streams_[rank];
    const Peers peers = peers_of(rank);
    std::vector<uint32_t> values(kShardBytes / 4);
    for (size_t i = 0; i < values.size(); ++i) values[i] = value(rank, number, i);
    const uint64_t shard = machine_.put(values, "shard");
    const uint64_t place = rank * kShardBytes;
    machine_.copy(stream, workspaces_[rank] + place, shard, kShardBytes);
    launch(stream, "begin_kernel", peers, int32_t{1});
    machine_.copy(stream, workspaces_[1 - rank] + place, shard, kShardBytes);
    if (setup_.delivery == Delivery::kFlagsByCopies) {
      const auto flag = static_cast<uint64_t>(kLayout.flag(0, {static_cast<int64_t>(rank), 0}));
      machine_.copy(stream, pads_[1 - rank] + flag * kSignalStride, to_push_[rank], 4);
      const uint64_t own = static_cast<uint64_t>(kDoneFlags) + rank;
      machine_.copy(stream, pads_[rank] + own * kSignalStride, to_push_[rank], 4);
      machine_.launch(stream, machine_.kernel("await_own_kernel"), {1, 1, 1}, {1, 1, 1}, peers);
    } else {
      launch(stream, "raise_kernel", peers, kLayout, int32_t{0});
    }
    launch(stream, "await_kernel", peers, kLayout, int32_t{0});
    results_[rank].push_back(machine_.memory().allocate(kRanks * kShardBytes, "result"));
    machine_.copy(stream, results_[rank].back(), workspaces_[rank], kRanks * kShardBytes);
    launch(stream, "end_kernel", peers);
  }

  void run() { machine_.run(); }

  void expect_results() {
    for (size_t r = 0; r < kRanks; ++r) {
      for (uint32_t number = 0; number < results_[r].size(); ++number) {
        const auto got = machine_.get<uint32_t>(results_[r][number], kRanks * kShardBytes / 4);
        for (size_t i = 0; i < got.size(); ++i) {
          const size_t per_shard = kShardBytes / 4;
          EXPECT_EQ(got[i], value(i / per_shard, number, i % per_shard)) << "call " << number;
        }
      }
    }
  }

  SpinFailure failure(size_t rank) { return machine_.get<SpinFailure>(failures_[rank], 1)[0]; }

 private:
  static uint32_t value(size_t rank, uint32_t number, size_t i) {
    return static_cast<uint32_t>(1000 * rank + 10000 * number + i);
  }

  template <typename... Args>
  void launch(int stream, const char* name, const Args&... args) {
    machine_.launch(stream, machine_.kernel(name), {1, 1, 1}, {32, 1, 1}, args...);
  }

  template <typename T>
  static T* pointer(uint64_t address) {
    return reinterpret_cast<T*>(address);
  }

  Peers peers_of(size_t rank) const {
    Peers peers;
    peers.rank = static_cast<int32_t>(rank);
    peers.num_ranks = kRanks;
    for (size_t r = 0; r < kRanks; ++r) {
      peers.workspaces[r] = pointer<void>(workspaces_[r]);
      peers.pads[r] = pointer<void>(pads_[r]);
    }
    peers.epoch = pointer<uint32_t>(epochs_[rank]);
    peers.epoch_to_push = pointer<uint32_t>(to_push_[rank]);
    peers.limit = {setup_.budget_ns, pointer<SpinFailure>(failures_[rank]), peers.rank};
    return peers;
  }

  Setup setup_;
  Machine machine_;
  std::array<int, kRanks> streams_{};
  std::array<uint64_t, kRanks> workspaces_{}, pads_{}, epochs_{}, to_push_{}, failures_{};
  std::array<std::vector<uint64_t>, kRanks> results_;
};

constexpr uint32_t kCalls = 4;

void run_calls(const std::string& ptx, const Setup& setup) {
  Ranks ranks(ptx, setup);
  for (uint32_t number = 0; number < kCalls; ++number) {
    for (size_t r = 0; r < kRanks; ++r) ranks.call(r, number);
  }
  ranks.run();
  ranks.expect_results();
}

using Handshake = testing::KernelTest;

TEST_F(Handshake, CallsGatherInEveryOrder) {
  const std::string text = ptx("handshake");
  for (const auto delivery : {Delivery::kFlagsByCopies, Delivery::kFlagsByKernel}) {
    for (const uint32_t epoch : {0u, 0xFFFFFFFDu}) {  // the second one wraps around
      for (uint64_t seed = 0; seed < 50; ++seed) {
        SCOPED_TRACE(seed);
        run_calls(text, {seed, epoch, 1'000'000'000, delivery});
      }
    }
  }
}

TEST_F(Handshake, ARankThatNeverComesIsNamed) {
  const std::string text = ptx("handshake");
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Ranks ranks(text, {seed, 7, 100'000, Delivery::kFlagsByCopies});
    ranks.call(0, 0);
    try {
      ranks.run();
      ADD_FAILURE() << "nobody noticed";
    } catch (const MachineError& error) {
      EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(MachineError::Kind::kTrap))
          << error.what();
    }
    const SpinFailure failure = ranks.failure(0);
    EXPECT_EQ(failure.state, SpinFailure::kWritten);
    EXPECT_EQ(failure.rank, 0);
    EXPECT_EQ(failure.peer, 1);
    EXPECT_EQ(failure.chunk, 0);
    EXPECT_EQ(failure.expected, 8u);
    EXPECT_EQ(failure.seen, 7u);
  }
}

struct Mutant {
  const char* from;
  const char* to;
};

TEST_F(Handshake, WeakenedOrdersAndWaitsAreNoticed) {
  const std::vector<Mutant> mutants = {
      {"st.release.sys.global", "st.relaxed.sys.global"},
      {"st.release.sys.global", "st.global"},
      {"st.release.sys.global", "st.release.gpu.global"},
      {"ld.acquire.sys.global", "ld.relaxed.sys.global"},
      {"ld.acquire.sys.global", "ld.acquire.gpu.global"},
      {"ld.acquire.sys.global", "ld.global"},
  };
  for (const Mutant& mutant : mutants) {
    SCOPED_TRACE(std::string(mutant.from) + " -> " + mutant.to);
    const std::string text = replaced(ptx("handshake"), mutant.from, mutant.to);
    int noticed = 0;
    for (uint64_t seed = 0; seed < 20; ++seed) {
      try {
        run_calls(text, {seed, 0, 1'000'000, Delivery::kFlagsByKernel});
      } catch (const MachineError& error) {
        EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(MachineError::Kind::kRace))
            << error.what();
        ++noticed;
      }
    }
    EXPECT_EQ(noticed, 20);
  }
}

TEST_F(Handshake, AWaitThatIsLeftOutIsNoticed) {
  // In await_kernel and begin_kernel, make every flag count as raised.
  const std::string whole = ptx("handshake");
  for (const std::string kernel : {"begin_kernel", "await_kernel"}) {
    SCOPED_TRACE(kernel);
    std::string text = whole;
    const size_t begin = text.find(".entry", text.rfind("\n", text.find(kernel)));
    const size_t end = text.find("\n}\n", begin);
    ASSERT_NE(end, std::string::npos);
    std::string body = text.substr(begin, end - begin);
    // A flag counts as raised if the difference of epochs is above -1; make that the least integer.
    body = replaced(body, ", -1;\n\t@", ", -2147483648;\n\t@");
    text.replace(begin, end - begin, body);
    int noticed = 0;
    for (uint64_t seed = 0; seed < 50; ++seed) {
      try {
        run_calls(text, {seed, 0, 1'000'000, Delivery::kFlagsByKernel});
      } catch (const MachineError&) {
        ++noticed;
      }
    }
    // If the flag is already up, looking at it orders as much as waiting does.
    EXPECT_GT(noticed, 5);
  }
}

}  // namespace
}  // namespace axonn::gpu_machine
