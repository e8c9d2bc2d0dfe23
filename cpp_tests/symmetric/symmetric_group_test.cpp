// Rendezvous, and groups before anything goes wrong. For the protocol under load and after failures
// see symmetric_group_traffic_test.cpp and symmetric_group_failure_test.cpp.
#include "core/symmetric/symmetric_group.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "core/ranks/errors.h"
#include "core/ranks/rendezvous.h"
#include "symmetric/ranks.h"

namespace axonn::comm {
namespace {

using testing::error_of;
using testing::expect_contains;
using testing::expect_success;
using testing::fork_child;
using testing::group_options;
using testing::InMemoryStore;
using testing::Launch;
using testing::run_group;
using testing::run_processes;
using testing::run_threads;
using testing::SharedArray;

int64_t num_descriptors() {
  namespace fs = std::filesystem;
  return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
}

// A call in which every rank receives `value + rank` from every rank.
void greet(SymmetricGroup& group, int64_t value) {
  Call call(group, CallSignature::of("greet", {value}), sizeof(int64_t));
  const int64_t mine = value + group.rank();
  std::memcpy(call.workspace(), &mine, sizeof(mine));
  call.signal(0);
  for (int64_t peer = 0; peer < group.size(); ++peer) {
    call.wait(peer, 0);
    int64_t theirs = 0;
    std::memcpy(&theirs, call.workspace_of(peer), sizeof(theirs));
    EXPECT_EQ(theirs, value + peer);
  }
}

class Rendezvous : public ::testing::TestWithParam<Launch> {};
INSTANTIATE_TEST_SUITE_P(Launch, Rendezvous,
                         ::testing::Values(Launch::kThreads, Launch::kRendezvousThreads,
                                           Launch::kProcesses),
                         [](const auto& test) { return testing::to_string(test.param); });

TEST_P(Rendezvous, OfOneToEightRanks) {
  for (const int64_t size : {1, 2, 3, 4, 8}) {
    expect_success(run_group(GetParam(), group_options(size), [&](SymmetricGroup& group) {
      EXPECT_EQ(group.size(), size);
      EXPECT_EQ(group.name(), "test");
      EXPECT_TRUE(group.on_one_host());
      EXPECT_EQ(group.obstacle(), "");
      for (int64_t value = 0; value < 5; ++value) greet(group, 100 * value);
    }));
  }
}

TEST_P(Rendezvous, WorkspacesAreAlignedWhateverTheirSize) {
  auto options = group_options(2);
  options.workspace_bytes = 4097;
  expect_success(run_group(GetParam(), options, [](SymmetricGroup& group) {
    for (int64_t i = 0; i < 4; ++i) {
      Call call(group, CallSignature::of("align", {}), 4097);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(call.workspace()) % 4096, 0u);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(call.workspace_of(1 - group.rank())) % 4096, 0u);
      call.workspace()[4096] = std::byte{1};
    }
  }));
}

TEST_P(Rendezvous, CountsTheBytesInUse) {
  expect_success(run_group(GetParam(), group_options(2), [](SymmetricGroup& group) {
    EXPECT_EQ(group.used_bytes(), 0);
    const int64_t sizes[] = {1000, 300, 200, 5000, 0};
    const int64_t used[] = {2000, 2000, 2000, 10000, 10000};  // in both halves
    for (int i = 0; i < 5; ++i) {
      {
        const Call call(group, CallSignature::of("use", {i}), sizes[i]);
      }
      EXPECT_EQ(group.used_bytes(), used[i]);
    }
  }));
}

// The default: 16 GiB per half, of which calls use what they need.
TEST(SymmetricGroup, DefaultWorkspaceIsOnlyAddressSpace) {
  auto options = group_options(2);
  options.workspace_bytes = GroupOptions{}.workspace_bytes;
  expect_success(run_group(Launch::kProcesses, options, [&](SymmetricGroup& group) {
    Call call(group, CallSignature::of("near", {}), 4096);
    call.workspace()[4095] = std::byte{7};
    call.signal(0);
    call.wait(1 - group.rank(), 0);
    EXPECT_EQ(call.workspace_of(1 - group.rank())[4095], std::byte{7});
    EXPECT_EQ(group.used_bytes(), 2 * 4096);
  }));
}

// A destroyed process group may be followed by another one of the same name, and the old one may
// still be alive when the new one starts.
TEST(SymmetricGroup, TwiceUnderOneNameOnOneStore) {
  for (const auto& run : {run_threads, run_processes}) {
    InMemoryStore store;
    expect_success(run(3, [&](int64_t rank) {
      auto first = SymmetricGroup::rendezvous(group_options(3, rank), store);
      greet(*first, 10);
      const auto second = SymmetricGroup::rendezvous(group_options(3, rank), store);
      greet(*second, 20);
      greet(*first, 30);
      first.reset();
      const auto third = SymmetricGroup::rendezvous(group_options(3, rank), store);
      greet(*third, 40);
      greet(*second, 50);
    }));
  }
}

// Four ranks as a 2x2 grid: groups that share ranks share nothing else.
TEST(SymmetricGroup, GroupsOfAGridAreIndependent) {
  InMemoryStore store;
  expect_success(run_processes(4, [&](int64_t rank) {
    auto rows = group_options(2, rank % 2), columns = group_options(2, rank / 2);
    rows.name = "row" + std::to_string(rank / 2);
    columns.name = "column" + std::to_string(rank % 2);
    const auto row = SymmetricGroup::rendezvous(rows, store);
    const auto column = SymmetricGroup::rendezvous(columns, store);
    for (int64_t i = 0; i < 50; ++i) {
      Call outer(*row, CallSignature::of("outer", {i}), 1);
      greet(*column, i);
      outer.signal(0);
      outer.wait(1 - row->rank(), 0);
    }
  }));
}

TEST(SymmetricGroup, KeepsOneDescriptorAPeer) {
  const int64_t before = num_descriptors();
  {
    const auto groups = SymmetricGroup::of_threads(group_options(4));
    EXPECT_EQ(num_descriptors(), before);
  }
  EXPECT_EQ(num_descriptors(), before);
  InMemoryStore store;
  expect_success(run_processes(4, [&](int64_t rank) {
    const int64_t own_before = num_descriptors();
    for (int i = 0; i < 3; ++i) {
      const auto group = SymmetricGroup::rendezvous(group_options(4, rank), store);
      EXPECT_EQ(num_descriptors(), own_before + 3);  // one to watch each peer
    }
    EXPECT_EQ(num_descriptors(), own_before);
  }));
}

TEST(SymmetricGroup, RanksOfSeveralHostsAllKnowIt) {
  for (const auto& run : {run_threads, run_processes}) {
    InMemoryStore store;
    expect_success(run(4, [&](int64_t rank) {
      const int64_t descriptors = num_descriptors();
      auto options = group_options(4, rank);
      if (rank == 2) options.host = "elsewhere";
      const auto group = SymmetricGroup::rendezvous(options, store);
      EXPECT_FALSE(group->on_one_host());
      EXPECT_EQ(group->used_bytes(), 0);
      expect_contains(group->obstacle(), {"on several hosts"});
      if (run == run_processes) {
        EXPECT_EQ(num_descriptors(), descriptors);
      }
    }));
  }
}

// The store of a rank whose host is a clone of its peers' hosts: their addresses name a process and
// a descriptor of this host, either the rank's own or those of no process.
class CloneStore : public KeyValueStore {
 public:
  CloneStore(KeyValueStore& store, int64_t rank, bool as_own)
      : store_(store), own_("/address/" + std::to_string(rank)), as_own_(as_own) {}

  void set(const std::string& key, const std::string& value) override {
    if (key.ends_with(own_)) here_ = as_own_ ? first_words(value) : "999999999 3";
    store_.set(key, value);
  }
  std::string get(const std::string& key) override {
    const auto value = store_.get(key);
    const bool of_peer = key.find("/address/") != std::string::npos && !key.ends_with(own_);
    return of_peer ? here_ + value.substr(first_words(value).size()) : value;
  }
  bool has(const std::string& key) override { return store_.has(key); }
  int64_t add(const std::string& key, int64_t amount) override { return store_.add(key, amount); }

 private:
  // The process and the descriptor, as text.
  static std::string first_words(const std::string& text) {
    return text.substr(0, text.find(' ', text.find(' ') + 1));
  }

  KeyValueStore& store_;
  const std::string own_;
  const bool as_own_;
  std::string here_;
};

TEST(SymmetricGroup, RanksOnClonesOfAHostShareNothing) {
  for (const bool as_own : {true, false}) {
    InMemoryStore shared;
    expect_success(run_processes(3, [&](int64_t rank) {
      CloneStore store(shared, rank, as_own);
      const auto group = SymmetricGroup::rendezvous(group_options(3, rank), store);
      EXPECT_FALSE(group->on_one_host());
      const std::string reason = as_own ? "is other memory than the peer's" : "/proc/999999999";
      expect_contains(group->obstacle(), {"rank 0", reason});
    }));
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they need the address space
TEST(SymmetricGroup, ARankWithoutAddressSpaceIsNamedAndNobodyWaits) {
  InMemoryStore store;
  expect_success(run_processes(3, [&](int64_t rank) {
    if (rank == 1) {
      const rlimit limit{int64_t{1} << 30, int64_t{1} << 30};
      ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
    }
    auto options = group_options(3, rank);
    options.workspace_bytes = int64_t{1} << 30;
    const auto group = SymmetricGroup::rendezvous(options, store);
    EXPECT_FALSE(group->on_one_host());
    expect_contains(group->obstacle(), {"rank 1: cannot map", "ulimit -v"});
  }));
}
#endif

// The group's own timeout counts, not the store's.
TEST(SymmetricGroup, MissingRanksAreNamed) {
  for (const auto& run : {run_threads, run_processes}) {
    InMemoryStore store;
    const auto outcomes = run(4, [&](int64_t rank) {
      auto options = group_options(4, rank);
      options.timeout = std::chrono::seconds(1);
      if (rank == 0 || rank == 2) SymmetricGroup::rendezvous(options, store);
    });
    for (const size_t rank : {0u, 2u}) {
      expect_contains(outcomes[rank].error,
                      {"rendezvous of group test: rank " + std::to_string(rank) +
                       " found no host of ranks 1, 3 after 1 s (AXONN_TIMEOUT_SECONDS)"});
      EXPECT_GE(outcomes[rank].seconds, 1);
    }
  }
}

// Its address was in the store, so the others know its process, even if it is gone when they look
// for its memory (late: rank 0 looks after that).
class DeathInTheRendezvous : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Late, DeathInTheRendezvous, ::testing::Bool());

TEST_P(DeathInTheRendezvous, IsNoticed) {
  class DyingStore : public InMemoryStore {
   public:
    using InMemoryStore::InMemoryStore;
    int64_t rank = -1;
    std::string get(const std::string& key) override {
      if (rank == 0 && GetParam() && key.find("address") != std::string::npos) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
      }
      return InMemoryStore::get(key);
    }
    void set(const std::string& key, const std::string& value) override {
      if (rank == 1 && key.find("obstacle") != std::string::npos) raise(SIGKILL);
      InMemoryStore::set(key, value);
    }
  };
  DyingStore store;
  const auto outcomes = run_processes(2, [&](int64_t rank) {
    store.rank = rank;  // each process has its own copy
    SymmetricGroup::rendezvous(group_options(2, rank), store);
  });
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  expect_contains(outcomes[0].error, {"rank 0 waited for the obstacle of rank 1", "has died"});
}

TEST(RendezvousStore, ThatIsGoneIsNamed) {
  class LostStore : public InMemoryStore {
   public:
    bool has(const std::string&) override { throw std::runtime_error("connection reset"); }
  };
  LostStore store;
  comm::Rendezvous ranks({"test", 0, 2, std::chrono::seconds(20)}, store);
  expect_contains(error_of([&] { ranks.exchange("address", "here"); }),
                  {"rendezvous of group test: rank 0 lost the c10d store", "connection reset"});
}

TEST(SymmetricGroup, AnotherWorkspaceSizeIsAnErrorOnAllRanks) {
  InMemoryStore store;
  const auto outcomes = run_processes(3, [&](int64_t rank) {
    auto options = group_options(3, rank);
    if (rank == 2) options.workspace_bytes *= 2;
    SymmetricGroup::rendezvous(options, store);
  });
  for (const auto& outcome : outcomes) {
    expect_contains(outcome.error, {"rank 2 comes with", "AXONN_SYMMETRIC_MEMORY_BYTES"});
  }
}

// Python forks too, for data loaders and subprocess. Such a child is no rank, however it ends.
TEST(SymmetricGroup, AForkedChildThatExitsChangesNothing) {
  InMemoryStore store;
  expect_success(run_processes(2, [&](int64_t rank) {
    auto group = SymmetricGroup::rendezvous(group_options(2, rank), store);
    greet(*group, 1);
    const pid_t child = fork_child([&] { group.reset(); });
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    for (int64_t i = 0; i < 3; ++i) greet(*group, i);
  }));
}

// Its writes would be its parent's.
TEST(SymmetricGroup, AForkedChildIsRefusedAndHarmsNobody) {
  InMemoryStore store;
  expect_success(run_processes(2, [&](int64_t rank) {
    auto group = SymmetricGroup::rendezvous(group_options(2, rank), store);
    greet(*group, 1);
    const pid_t child = fork_child([&] {
      const auto error = error_of([&] { greet(*group, 2); });
      expect_contains(error, {"greet: process " + std::to_string(getpid()) + " is a fork of rank " +
                                  std::to_string(rank) + " of group test",
                              "'spawn'"});
      group->abandon();
    });
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    for (int64_t i = 0; i < 3; ++i) greet(*group, i);
  }));
}

// Two threads of one rank, such as forward and backward, make one call at a time.
TEST(SymmetricGroup, CallsOfTwoThreadsOfARankDoNotInterleave) {
  const auto groups = SymmetricGroup::of_threads(group_options(1));
  std::vector<std::thread> threads;
  int64_t inside = 0;  // not atomic, so that the sanitizer would report a race
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      for (int64_t i = 0; i < 500; ++i) {
        const Call call(*groups[0], CallSignature::of("alone", {i}), 8);
        EXPECT_EQ(++inside, 1);
        std::this_thread::yield();
        --inside;
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(CallSignature, DescribesItself) {
  const auto signature = CallSignature::of("all_gather_matmul", {3, -4});
  EXPECT_EQ(signature.describe(), "all_gather_matmul(3, -4)");
  EXPECT_EQ(signature.op(), "all_gather_matmul");
  EXPECT_EQ(signature, CallSignature::of("all_gather_matmul", {3, -4}));
  EXPECT_NE(signature, CallSignature::of("all_gather_matmul", {3, 4}));
  EXPECT_NE(signature, CallSignature::of("all_gather", {3, -4}));
  EXPECT_EQ(CallSignature::of("all_gather shard=float32[4,8] dim=0").op(), "all_gather");
  EXPECT_EQ(CallSignature::of("align", {}).describe(), "align()");
}

TEST(CallSignature, TellsLongTextsApartByWhatIsCutOff) {
  const std::string text = "op " + std::string(1000, 'x');
  const auto one = CallSignature::of(text + "1"), other = CallSignature::of(text + "2");
  EXPECT_NE(one, other);
  EXPECT_EQ(one, CallSignature::of(text + "1"));
  EXPECT_EQ(one.describe().size(), 255);
  EXPECT_EQ(one.op(), "op");
  expect_contains(one.describe(), {"op xxx", "... #"});
  const std::string fits(255, 'y');
  EXPECT_EQ(CallSignature::of(fits).describe(), fits);
}

}  // namespace
}  // namespace axonn::comm
