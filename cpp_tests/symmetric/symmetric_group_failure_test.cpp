// The error of a rank when a peer does not do its part: it names rank, peer and op.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/ranks/errors.h"
#include "core/ranks/waits.h"
#include "core/symmetric/symmetric_group.h"
#include "symmetric/ranks.h"

namespace axonn::comm {
namespace {

using testing::error_of;
using testing::expect_contains;
using testing::expect_success;
using testing::group_options;
using testing::InMemoryStore;
using testing::Launch;
using testing::Outcome;
using testing::run_group;
using testing::run_processes;
using testing::run_threads;
using testing::SharedArray;
using testing::Timer;

CallSignature signature(const char* op = "fused_op", int64_t argument = 5) {
  return CallSignature::of(op, {argument});
}

// One call in which every rank waits for every rank.
void exchange(SymmetricGroup& group, const CallSignature& what = signature()) {
  Call call(group, what, 8);
  call.signal(0);
  for (int64_t peer = 0; peer < group.size(); ++peer) call.wait(peer, 0);
}

std::string waited_for(int64_t rank, int64_t peer) {
  return "rank " + std::to_string(rank) + " waited for rank " + std::to_string(peer) +
         " of group test";
}

// Checks the error of a rank that gave up; returns how many seconds that took.
double expect_failure(const std::function<void()>& body, const std::vector<std::string>& parts) {
  const Timer timer;
  const std::string error = error_of(body);
  const double seconds = timer.seconds();
  EXPECT_NE(error, "");
  expect_contains(error, parts);
  return seconds;
}

class Failure : public ::testing::TestWithParam<Launch> {
 protected:
  void expect_all_well(int64_t size, const testing::GroupBody& body) {
    expect_success(run_group(GetParam(), group_options(size), body));
  }
};
INSTANTIATE_TEST_SUITE_P(Launch, Failure, ::testing::Values(Launch::kThreads, Launch::kProcesses),
                         [](const auto& test) { return testing::to_string(test.param); });

// A wait for a late peer is in this process's table, with the call's number and name.
TEST(LateRank, IsInTheTableOfWaitsUntilItComes) {
  auto groups = SymmetricGroup::of_threads(group_options(2));
  const auto both = [&](const CallSignature& what) {
    expect_success(run_threads(2, [&](int64_t rank) { exchange(*groups[rank], what); }));
  };
  both(signature("first"));
  EXPECT_EQ(groups[0]->progress().issued, 1);
  EXPECT_EQ(groups[0]->progress().last, "first(5)");
  std::thread early([&] { exchange(*groups[0], signature("second")); });
  std::vector<Wait> waits;
  for (const Timer timer; waits.empty() && timer.seconds() < testing::kHang.count();)
    waits = waits_under_way();
  EXPECT_EQ(groups[0]->progress().issued, 2);
  EXPECT_EQ(groups[0]->progress().completed, 1);
  EXPECT_EQ(groups[1]->progress().issued, 1);
  exchange(*groups[1], signature("second"));
  early.join();
  ASSERT_EQ(waits.size(), 1U);
  EXPECT_EQ(waits[0].call, "second(5)");
  EXPECT_EQ(waits[0].number, 2);
  EXPECT_EQ(waits[0].peers, std::vector<int64_t>{1});
  EXPECT_EQ(waits[0].axis, "test");
  EXPECT_EQ(waits[0].what, "has not started this call");
  EXPECT_GE(WaitClock::now() - waits[0].since, kNotedAfter);
  EXPECT_TRUE(waits_under_way().empty());
}

TEST_P(Failure, MismatchingCallsNameBothSignatures) {
  for (const auto& other : {signature("other_op", 5), signature("fused_op", 6)}) {
    expect_all_well(2, [&](SymmetricGroup& group) {
      exchange(group);
      const int64_t rank = group.rank(), peer = 1 - rank;
      const auto& mine = rank == 0 ? signature() : other;
      const auto& theirs = rank == 0 ? other : signature();
      // Both wait, so both notice; the one that comes second may see the peer's failure first.
      const auto error = error_of([&] { exchange(group, mine); });
      expect_contains(error, {waited_for(rank, peer)});
      if (error.find("failed; see the error") == std::string::npos) {
        expect_contains(error, {mine.describe() + ": rank", "called " + theirs.describe()});
      }
    });
  }
}

// A rank sees the signatures if it looks at a peer that has started and does not fail meanwhile.
TEST_P(Failure, AMismatchIsFoundBeforeAnyDataIsRead) {
  expect_all_well(2, [](SymmetricGroup& group) {
    if (group.rank() == 1) {
      Call call(group, signature("other_op", 6), 8);
      call.signal(0);  // the flag that rank 0 waits for, which must not be enough
      return;
    }
    expect_failure([&] { exchange(group); },
                   {signature().describe() + ": " + waited_for(0, 1),
                    "called " + signature("other_op", 6).describe() + " instead",
                    "same calls, in the same order"});
  });
}

// Without data, as before calls of something that is not made of Calls.
TEST_P(Failure, ComparingFindsAMismatchOnEveryRank) {
  expect_all_well(3, [](SymmetricGroup& group) {
    for (int i = 0; i < 20; ++i) {
      Call call(group, signature("fused_op", i), 0);
      call.compare();
    }
    exchange(group);  // in step with calls that move data
    const auto mine = group.rank() == 1 ? signature("other_op", 6) : signature();
    const auto error = error_of([&] {
      Call call(group, mine, 0);
      call.compare();
    });
    expect_contains(error, {"rank " + std::to_string(group.rank()) + " waited for rank "});
  });
}

TEST_P(Failure, AnExceptionInsideACallEndsThePeersWaits) {
  const SharedArray<std::atomic<int>> told(1);
  const auto outcomes = run_group(GetParam(), group_options(3), [&](SymmetricGroup& group) {
    exchange(group);
    if (group.rank() == 1) {
      // It is caught and the process lives on, so only the group tells the peers.
      const auto error = error_of([&] {
        const Call call(group, signature(), 8);
        throw std::runtime_error("matmul broke");
      });
      EXPECT_EQ(error, "matmul broke");
      while (told[0] < 2) usleep(1000);
      return;
    }
    // Rank 0 meets rank 1 first. Rank 2 may come late and meet rank 0, which failed for that.
    const auto parts = group.rank() == 0 ? std::vector<std::string>{waited_for(0, 1)}
                                         : std::vector<std::string>{"rank 2 waited for rank "};
    expect_failure([&] { exchange(group); }, parts);
    expect_failure([&] { exchange(group); }, {"cannot be used any more"});
    ++told[0];
  });
  expect_success(outcomes);
}

TEST_P(Failure, AfterAFailureTheGroupRefusesCalls) {
  expect_all_well(2, [](SymmetricGroup& group) {
    EXPECT_NE(error_of([&] {
                Call call(group, signature(), 8);
                if (group.rank() == 1) throw std::runtime_error("on purpose");
                call.wait(1, 0);
              }),
              "");
    for (int i = 0; i < 2; ++i) {
      expect_failure([&] { exchange(group, signature("later_op")); },
                     {"later_op", "group test cannot be used any more", "an earlier call failed"});
    }
  });
}

// An exception that passes through a live call makes it fail, wherever it comes from; a call that
// starts and ends while another exception is in flight does not fail.
TEST_P(Failure, ACallInADestructorDuringUnwindingSucceeds) {
  struct LastWords {
    SymmetricGroup& group;
    ~LastWords() { exchange(group); }
  };
  expect_all_well(2, [](SymmetricGroup& group) {
    EXPECT_EQ(error_of([&] {
                const LastWords last_words{group};
                throw std::runtime_error("elsewhere");
              }),
              "elsewhere");
    exchange(group);
  });
}

TEST_P(Failure, DataOfAPeerThatFailsLaterIsStillGood) {
  expect_all_well(2, [](SymmetricGroup& group) {
    if (group.rank() == 1) {
      error_of([&] {
        Call call(group, signature(), 8);
        call.workspace()[3] = std::byte{33};
        call.signal(0);
        throw std::runtime_error("after the signal");
      });
      return;
    }
    Call call(group, signature(), 8);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    call.wait(1, 0);
    EXPECT_EQ(call.workspace_of(1)[3], std::byte{33});
  });
}

TEST_P(Failure, APeerThatHasLeftIsNamed) {
  expect_all_well(2, [](SymmetricGroup& group) {
    exchange(group);
    if (group.rank() == 1) return;  // and destroys the group
    expect_failure([&] { exchange(group); }, {waited_for(0, 1)});
  });
}

TEST(FailureOfThreads, APeerThatHasLeftIsToldFromOneThatFailed) {
  auto groups = SymmetricGroup::of_threads(group_options(2));
  groups[1].reset();
  expect_failure([&] { exchange(*groups[0]); }, {waited_for(0, 1), "has left the group"});
  groups = SymmetricGroup::of_threads(group_options(2));
  error_of([&] {
    const Call call(*groups[1], signature(), 0);
    throw std::runtime_error("on purpose");
  });
  groups[1].reset();
  expect_failure([&] { exchange(*groups[0]); }, {waited_for(0, 1), "failed; see the error"});
}

TEST_P(Failure, TheTimeLimitNamesItsSetting) {
  auto options = group_options(2);
  options.timeout = std::chrono::seconds(1);  // also for the rendezvous
  const SharedArray<std::atomic<bool>> through(1);
  expect_success(run_group(GetParam(), options, [&](SymmetricGroup& group) {
    if (group.rank() == 1) {
      while (!through[0]) usleep(1000);  // alive, but never makes the call
      return;
    }
    const double seconds = expect_failure(
        [&] { exchange(group); }, {"fused_op: " + waited_for(0, 1),
                                   "has not started this call after 1 s", "AXONN_TIMEOUT_SECONDS"});
    EXPECT_GE(seconds, 1);
    through[0] = true;
  }));
}

TEST_P(Failure, TheTimeLimitTellsAPeerThatStartedFromOneThatDidNot) {
  auto options = group_options(2);
  options.timeout = std::chrono::seconds(1);  // also for the rendezvous
  const SharedArray<std::atomic<bool>> signaled(1), through(1);
  expect_success(run_group(GetParam(), options, [&](SymmetricGroup& group) {
    Call call(group, signature(), 8);
    if (group.rank() == 1) {
      call.signal(4);
      signaled[0] = true;
      while (!through[0]) usleep(1000);
      return;
    }
    while (!signaled[0]) usleep(1000);
    call.wait(1, 4);
    expect_failure([&] { call.wait(1, 5); },
                   {waited_for(0, 1), "has not delivered its part after 1 s"});
    through[0] = true;
  }));
}

TEST_P(Failure, ARankThatRunsAheadWaitsForItsHalf) {
  auto options = group_options(2);
  options.timeout = std::chrono::seconds(1);  // also for the rendezvous
  const SharedArray<std::atomic<bool>> through(1);
  expect_success(run_group(GetParam(), options, [&](SymmetricGroup& group) {
    if (group.rank() == 1) {
      while (!through[0]) usleep(1000);
      return;
    }
    for (int i = 0; i < 2; ++i) {  // both halves are free
      const Call call(group, signature(), 8);
    }
    expect_failure([&] { const Call call(group, signature(), 8); },
                   {waited_for(0, 1), "is two calls behind after 1 s"});
    expect_failure([&] { const Call call(group, signature(), 8); }, {"cannot be used any more"});
    through[0] = true;
  }));
}

// Peers must learn of a wait that fails in the constructor, though no destructor runs.
TEST_P(Failure, AConstructorThatFailsIsToldToThePeers) {
  auto options = group_options(2);
  options.timeout = std::chrono::seconds(1);
  const SharedArray<std::atomic<bool>> failed(1), told(1);
  expect_success(run_group(GetParam(), options, [&](SymmetricGroup& group) {
    if (group.rank() == 0) {
      for (int i = 0; i < 2; ++i) {
        const Call call(group, signature(), 8);
      }
      expect_failure([&] { const Call call(group, signature(), 8); }, {"is two calls behind"});
      failed[0] = true;
      while (!told[0]) usleep(1000);
      return;
    }
    while (!failed[0]) usleep(1000);
    for (int i = 0; i < 2; ++i) {
      const Call call(group, signature(), 8);
    }
    expect_failure([&] { exchange(group); }, {waited_for(1, 0), "failed; see the error"});
    told[0] = true;
  }));
}

TEST_P(Failure, TooLargeAWorkspaceOnAllRanksLeavesTheGroupUsable) {
  expect_all_well(3, [](SymmetricGroup& group) {
    for (int round = 0; round < 5; ++round) {
      if (round % 3 == 0) exchange(group);  // otherwise refused several times in a row
      expect_failure([&] { const Call call(group, signature(), (1 << 20) + 1); },
                     {"fused_op: needs 1048577 bytes of symmetric memory",
                      "1048576 reserved; raise AXONN_SYMMETRIC_MEMORY_BYTES"});
    }
    exchange(group);
    EXPECT_LE(group.used_bytes(), 16);
  });
}

TEST_P(Failure, TooLargeAWorkspaceOnOneRankEndsThePeersWaits) {
  const SharedArray<std::atomic<bool>> told(1);
  expect_all_well(2, [&](SymmetricGroup& group) {
    if (group.rank() == 1) {
      expect_failure([&] { const Call call(group, signature(), 1 << 30); }, {"reserved"});
      while (!told[0]) usleep(1000);
      return;
    }
    expect_failure([&] { exchange(group); }, {waited_for(0, 1), "too large", "fused_op"});
    told[0] = true;
  });
}

TEST_P(Failure, FlagsOutOfRangeAreRefused) {
  expect_all_well(1, [](SymmetricGroup& group) {
    Call call(group, signature(), 8);
    for (const int64_t flag : {int64_t{-1}, SymmetricGroup::kNumFlags}) {
      EXPECT_THROW(call.signal(flag), std::out_of_range);
      EXPECT_THROW(call.wait(0, flag), std::out_of_range);
    }
    call.signal(SymmetricGroup::kNumFlags - 1);
    call.wait(0, SymmetricGroup::kNumFlags - 1);
  });
}

class Killed : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Killed, ::testing::Values(2, 4, 8));

// The victim stays a zombie, which nobody reaps before the other ranks are done.
TEST_P(Killed, InsideACall) {
  const int64_t size = GetParam(), victim = size - 1;
  const auto outcomes =
      run_group(Launch::kProcesses, group_options(size), [&](SymmetricGroup& group) {
        for (int i = 0; i < 20; ++i) exchange(group);
        if (group.rank() == victim) {
          Call call(group, signature(), 8);
          usleep(20'000);
          raise(SIGKILL);
        }
        const auto error = error_of([&] { exchange(group); });
        // All have delivered except the victim, which everybody waits for last. A rank that looked
        // after another one had given up would still have found that one's part.
        expect_contains(error, {"fused_op: " + waited_for(group.rank(), victim), "has died"});
      });
  for (int64_t rank = 0; rank < size; ++rank) {
    EXPECT_EQ(outcomes[rank].signal, rank == victim ? SIGKILL : 0);
    EXPECT_EQ(outcomes[rank].error, "") << "rank " << rank;
  }
}

TEST_P(Killed, BetweenCalls) {
  const int64_t size = GetParam();
  const auto outcomes =
      run_group(Launch::kProcesses, group_options(size), [&](SymmetricGroup& group) {
        for (int i = 0; i < 20; ++i) exchange(group);
        if (group.rank() == 0) raise(SIGKILL);
        const auto error = error_of([&] {
          for (int i = 0; i < 3; ++i) exchange(group);
        });
        expect_contains(error, {waited_for(group.rank(), 0), "has died"});
      });
  for (int64_t rank = 0; rank < size; ++rank) {
    EXPECT_EQ(outcomes[rank].signal, rank == 0 ? SIGKILL : 0);
    EXPECT_EQ(outcomes[rank].error, "") << "rank " << rank;
  }
}

// A rank that never reads still notices, as soon as it needs its half again.
TEST(KilledReader, IsNoticedByARankThatOnlyWrites) {
  const auto outcomes = run_group(Launch::kProcesses, group_options(2), [](SymmetricGroup& group) {
    exchange(group);
    if (group.rank() == 1) raise(SIGKILL);
    expect_failure(
        [&] {
          for (int i = 0; i < 3; ++i) {
            Call call(group, signature(), 8);
            call.signal(0);
          }
        },
        {waited_for(0, 1), "has died"});
  });
  EXPECT_EQ(outcomes[0].error, "");
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
}

// Its data arrived before it died, so the call it took part in is complete.
TEST(KilledAfterItsPart, TheCallSucceeds) {
  const auto outcomes = run_group(Launch::kProcesses, group_options(2), [](SymmetricGroup& group) {
    if (group.rank() == 1) {
      Call call(group, signature(), 8);
      call.signal(0);
      raise(SIGKILL);
    }
    usleep(100'000);
    exchange(group);
  });
  EXPECT_EQ(outcomes[0].error, "");
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
}

// Questions that ranks ask each other between two calls.
TEST(Question, APeerThatHasGoneOnOrLeftWillNotAnswer) {
  std::atomic<bool> asked = false;
  auto groups = SymmetricGroup::of_threads(group_options(2));
  const auto all_exchange = [&](int64_t rank) { exchange(*groups[rank]); };
  expect_success(testing::run_threads(2, all_exchange));
  EXPECT_EQ(groups[1]->obstacle_to_answer(0), "");
  expect_success(testing::run_threads(2, [&](int64_t rank) {
    if (rank == 0) {
      Call call(*groups[0], signature("the_next_op"), 8);
      call.signal(0);
      while (!asked) std::this_thread::yield();
      call.wait(1, 0);
      return;
    }
    const Timer timer;
    std::string obstacle;
    while (obstacle.empty() && timer.seconds() < testing::kHang.count()) {
      obstacle = groups[1]->obstacle_to_answer(0);
    }
    asked = true;
    EXPECT_EQ(obstacle, "has gone on to the_next_op(5)");
    exchange(*groups[1], signature("the_next_op"));
  }));
  EXPECT_EQ(groups[1]->obstacle_to_answer(0), "");
  groups[0].reset();
  EXPECT_EQ(groups[1]->obstacle_to_answer(0), "has left the group");
}

}  // namespace
}  // namespace axonn::comm
