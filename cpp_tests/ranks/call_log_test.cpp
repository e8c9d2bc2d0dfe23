#include "core/ranks/call_log.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/ranks/errors.h"
#include "core/ranks/watchdog.h"
#include "ranks/in_memory_store.h"

namespace axonn::comm {
namespace {

using std::chrono::milliseconds;

CallLogOptions log_options(int64_t rank, int64_t size, bool compare,
                           std::chrono::duration<double> timeout = std::chrono::seconds(300)) {
  CallLogOptions options{"z", "test/z", rank, {}, compare, timeout};
  for (int64_t i = 0; i < size; ++i) options.ranks.push_back(10 * i);  // global ranks
  return options;
}

// The error that each rank's thread threw, or "".
std::vector<std::string> on_ranks(int64_t size, const std::function<void(int64_t)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const CommunicationError& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

TEST(CallLog, ProgressSurvivesTheStore) {
  const CallProgress progress{12, 9, "all_reduce sum float32[1024]"};
  EXPECT_EQ(CallProgress::decode(progress.encode()), progress);
  EXPECT_EQ(CallProgress::decode(CallProgress{}.encode()), CallProgress{});
}

TEST(CallLog, EqualCallsDoNotDiverge) {
  EXPECT_EQ(describe_divergence("z", 3, {0, 1}, {"a", "a"}), std::nullopt);
}

TEST(CallLog, TheRankThatDivergesComesLast) {
  EXPECT_EQ(
      describe_divergence("z", 3, {0, 1, 2, 7}, {"b", "b", "a", "b"}),
      "axis z: the ranks diverge at call 3: b on ranks 0, 1, 7; a on rank 2. All calls before "
      "it were equal");
}

TEST(CallLog, TimeoutNamesTheRanksThatHaveNotIssuedTheCall) {
  const auto text = describe_timeout(
      "z", 5, "all_gather float32[8]", 2.5, {0, 4, 8, 12},
      {CallProgress{5, 4, "all_gather float32[8]"}, CallProgress{3, 3, "all_reduce sum float32[1]"},
       CallProgress{}, CallProgress{6, 4, "x"}});
  EXPECT_EQ(text,
            "axis z: call 5, all_gather float32[8], is not done after 2.5 s; behind: rank 4, whose "
            "last is call 3, all_reduce sum float32[1]; rank 8, which has issued none");
}

TEST(CallLog, TimeoutOfACallThatAllHaveIssued) {
  EXPECT_EQ(
      describe_timeout("x", 2, "a", 1, {0, 1}, {CallProgress{2, 1, "a"}, CallProgress{3, 2, "b"}}),
      "axis x: call 2, a, is not done after 1 s; all ranks have issued it, not done on rank 0");
  EXPECT_EQ(describe_timeout("x", 2, "a", 1, {0, 1}, {CallProgress{2, 1, "a"}, std::nullopt}),
            "axis x: call 2, a, is not done after 1 s; nothing was heard of rank 1");
}

TEST(CallLog, RanksAgreeOnManyCalls) {
  testing::InMemoryStore store;
  constexpr int64_t kCalls = 200;
  std::atomic<int64_t> total = 0;
  const auto errors = on_ranks(3, [&](int64_t rank) {
    CallLog log(log_options(rank, 3, true), store);
    for (int64_t i = 0; i < kCalls; ++i) {
      log.announce("call " + std::to_string(i));
      log.agree();
    }
    total += log.progress().issued;
  });
  EXPECT_EQ(errors, std::vector<std::string>(3));
  EXPECT_EQ(total, 3 * kCalls);
}

TEST(CallLog, EveryRankLearnsWhoDivergedAndWhere) {
  testing::InMemoryStore store;
  const auto errors = on_ranks(3, [&](int64_t rank) {
    CallLog log(log_options(rank, 3, true), store);
    for (int64_t i = 1; i <= 5; ++i) {
      log.announce(rank == 1 && i == 4 ? "all_reduce" : "all_gather");
      log.agree();
    }
  });
  for (const auto& error : errors) {
    EXPECT_EQ(
        error,
        "axis z: the ranks diverge at call 4: all_gather on ranks 0, 20; all_reduce on rank 10. "
        "All calls before it were equal");
  }
}

TEST(CallLog, ARankThatStaysAwayIsNamed) {
  testing::InMemoryStore store;
  const auto errors = on_ranks(2, [&](int64_t rank) {
    CallLog log(log_options(rank, 2, true, std::chrono::seconds(1)), store);
    for (int64_t i = 0; i < 2 - rank; ++i) {
      log.announce("all_gather");
      log.agree();
      log.publish();
    }
  });
  EXPECT_NE(errors[0].find("call 2, all_gather, is not done after 1 s; behind: rank 10, whose last "
                           "is call 1"),
            std::string::npos)
      << errors[0];
  EXPECT_EQ(errors[1], "");
}

TEST(CallLog, AFailureElsewhereEndsTheWait) {
  testing::InMemoryStore store;
  const auto errors = on_ranks(2, [&](int64_t rank) {
    if (rank == 1) return;  // it has failed on another axis
    CallLog log(log_options(rank, 2, true, std::chrono::seconds(300)), store);
    log.announce("all_gather");
    int64_t checks = 0;
    log.agree([&] {
      if (++checks == 3) throw CommunicationError("rank 10 has failed");
    });
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"rank 10 has failed", ""}));
}

// A rank with its own watchdog. Its calls are done once `done` is true.
struct WatchedRank {
  WatchedRank(
      int64_t rank, int64_t size, KeyValueStore& store, std::chrono::duration<double> timeout,
      std::function<void()> health = [] {},
      std::chrono::duration<double> store_interval = milliseconds(5))
      : log(std::make_shared<CallLog>(log_options(rank, size, false), store)),
        calls(std::make_shared<WatchedCalls>(log)),
        watch({"test", rank, timeout, milliseconds(2), store_interval}, store, std::move(health),
              [this] { ++aborts; }) {
    watch.watch(calls);
  }

  void issue(const std::string& signature) {
    calls->add(log->announce(signature), signature, [this] { return done.load(); });
  }

  std::string await_failure() {
    for (int i = 0; i < 150'000; ++i) {  // five minutes
      try {
        watch.check();
      } catch (const CommunicationError& error) {
        if (aborts > 0) return error.what();
      }
      std::this_thread::sleep_for(milliseconds(2));
    }
    return "";
  }

  std::atomic<bool> done = false;
  std::atomic<int> aborts = 0;
  std::shared_ptr<CallLog> log;
  std::shared_ptr<WatchedCalls> calls;
  Watchdog watch;
};

TEST(Watchdog, CallsThatAreDoneAreNoFailure) {
  testing::InMemoryStore store;
  WatchedRank rank(0, 1, store, milliseconds(500));
  rank.done = true;
  rank.issue("all_gather");
  for (int i = 0; i < 300'000 && rank.log->progress().completed == 0; ++i) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_EQ(rank.log->progress().completed, 1);
  rank.watch.check();
  EXPECT_EQ(rank.aborts, 0);
}

// A call's time starts when the previous call is done. A busy machine may take that long between
// two looks at the clock, but not every time.
TEST(WatchedCalls, ACallIsNotLateForTheTimeOfTheOneInFrontOfIt) {
  testing::InMemoryStore store;
  const auto log = std::make_shared<CallLog>(log_options(0, 1, false), store);
  bool on_time = false;
  for (int attempt = 0; attempt < 50 && !on_time; ++attempt) {
    WatchedCalls calls(log);
    calls.add(1, "first", [] { return true; });
    calls.add(2, "second", [] { return false; });
    std::this_thread::sleep_for(milliseconds(20));
    try {
      calls.poll(milliseconds(20));
      on_time = true;
    } catch (const CommunicationError&) {
    }
  }
  EXPECT_TRUE(on_time);
}

TEST(Watchdog, ALateCallAbortsEveryRankAndNamesTheOneBehind) {
  testing::InMemoryStore store;
  WatchedRank first(0, 2, store, milliseconds(150));
  WatchedRank second(1, 2, store, std::chrono::seconds(300));  // would not notice on its own
  first.issue("all_gather float32[8]");
  const std::string why = first.await_failure();
  EXPECT_NE(why.find("axis z: call 1, all_gather float32[8], is not done"), std::string::npos)
      << why;
  EXPECT_NE(why.find("behind: rank 10, which has issued none"), std::string::npos) << why;
  EXPECT_EQ(second.await_failure(), "rank 0 reports: " + why);
  EXPECT_EQ(first.aborts, 1);
  EXPECT_EQ(second.aborts, 1);
}

TEST(Watchdog, AnAsynchronousErrorIsAFailure) {
  testing::InMemoryStore store;
  std::atomic<bool> broken = false;
  WatchedRank rank(0, 1, store, std::chrono::seconds(300), [&] {
    if (broken) throw CommunicationError("axis z: remote error");
  });
  rank.watch.check();
  broken = true;
  EXPECT_EQ(rank.await_failure(), "axis z: remote error");
}

// The second rank reads the store once at its start, then only because its communicator broke.
TEST(Watchdog, APeerThatHearsOfTheAbortFirstSaysWhy) {
  testing::InMemoryStore store;
  WatchedRank first(0, 2, store, milliseconds(150));
  WatchedRank second(
      1, 2, store, std::chrono::seconds(300),
      [&] {
        if (first.aborts > 0) throw CommunicationError("axis z: remote error");
      },
      std::chrono::seconds(300));
  first.issue("all_gather float32[8]");
  const std::string why = first.await_failure();
  EXPECT_NE(why.find("behind: rank 10"), std::string::npos) << why;
  EXPECT_EQ(second.await_failure(), "rank 0 reports: " + why);
}

// Likewise for a call of the rank's own thread, which the abort makes fail.
TEST(Watchdog, TheReasonOfAnErrorIsWhatAPeerHasReported) {
  testing::InMemoryStore store;
  WatchedRank first(0, 2, store, std::chrono::seconds(300));
  WatchedRank second(1, 2, store, std::chrono::seconds(300), [] {}, std::chrono::seconds(300));
  EXPECT_EQ(second.watch.reason("remote error"), "remote error");
  first.watch.fail("refused");
  EXPECT_EQ(first.await_failure(), "refused");
  EXPECT_EQ(second.watch.reason("remote error"), "rank 0 reports: refused");
  first.watch.fail("aborted");
  EXPECT_EQ(first.watch.reason("remote error"), "refused") << "not the first failure";
}

}  // namespace
}  // namespace axonn::comm
