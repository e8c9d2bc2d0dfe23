// Runs the ranks of a test as threads, which the thread sanitizer can follow, or as forked
// processes, which real ranks are and which can be killed.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/symmetric/symmetric_group.h"
#include "ranks/in_memory_store.h"

namespace axonn::comm::testing {

struct Outcome {
  std::string error;  // what() of the exception that ended the rank; empty: none
  int signal = 0;     // that killed the process; 0: none
  double seconds = 0;
};

// Only a hang takes this long, even on a busy machine.
constexpr std::chrono::seconds kHang{300};

class Timer {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

using RankBody = std::function<void(int64_t rank)>;

inline std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return *error.what() == '\0' ? "an exception without a text" : error.what();
  }
  return "";
}

inline std::vector<Outcome> run_threads(int64_t size, const RankBody& body) {
  std::vector<Outcome> outcomes(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&body, &outcome = outcomes[rank], rank] {
      const Timer timer;
      outcome.error = error_of([&] { body(rank); });
      outcome.seconds = timer.seconds();
    });
  }
  for (auto& thread : threads) thread.join();
  return outcomes;
}

// Starts a child process that runs `body` and exits without running the parent's destructors. It
// does not outlive the parent, and cannot hang forever.
inline pid_t fork_child(const std::function<void()>& body) {
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(2);
  alarm(static_cast<unsigned>(kHang.count()));
  const std::string error = error_of(body);
  if (!error.empty()) fprintf(stderr, "child: %s\n", error.c_str());
  _exit(!error.empty() || ::testing::Test::HasFailure() ? 1 : 0);
}

// Shared memory: what one side of a fork writes, the other can read, even after the writer has
// ended.
template <typename T>
class SharedArray {
 public:
  explicit SharedArray(int64_t count) : bytes_(static_cast<size_t>(count) * sizeof(T)) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no memory to share");
    data_ = static_cast<T*>(memory);
  }
  ~SharedArray() { munmap(data_, bytes_); }
  SharedArray(const SharedArray&) = delete;
  SharedArray& operator=(const SharedArray&) = delete;

  T& operator[](int64_t index) const { return data_[index]; }

 private:
  size_t bytes_;
  T* data_;
};

inline std::vector<Outcome> run_processes(int64_t size, const RankBody& body) {
  struct Report {
    char error[1024];
    double seconds;
  };
  const SharedArray<Report> reports(size);
  std::vector<pid_t> children;
  for (int64_t rank = 0; rank < size; ++rank) {
    children.push_back(fork_child([&] {
      const Timer timer;
      auto error = error_of([&] { body(rank); });
      if (error.empty() && ::testing::Test::HasFailure()) error = "an expectation failed";
      std::strncpy(reports[rank].error, error.c_str(), sizeof(Report::error) - 1);
      reports[rank].seconds = timer.seconds();
    }));
  }
  std::vector<Outcome> outcomes;
  for (int64_t rank = 0; rank < size; ++rank) {
    int status = 0;
    waitpid(children[rank], &status, 0);
    Outcome outcome{reports[rank].error, WIFSIGNALED(status) ? WTERMSIG(status) : 0,
                    reports[rank].seconds};
    if (WIFEXITED(status) && WEXITSTATUS(status) != 0 && outcome.error.empty()) {
      outcome.error = "exit status " + std::to_string(WEXITSTATUS(status));
    }
    outcomes.push_back(outcome);
  }
  return outcomes;
}

inline void expect_success(const std::vector<Outcome>& outcomes) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_EQ(outcomes[rank].error, "") << "rank " << rank;
    EXPECT_EQ(outcomes[rank].signal, 0) << "rank " << rank;
  }
}

inline void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in '" << text << "'";
  }
}

enum class Launch {
  kThreads,            // of_threads: one mapping per arena
  kRendezvousThreads,  // every thread maps every arena
  kProcesses,
};

inline std::string to_string(Launch launch) {
  switch (launch) {
    case Launch::kThreads:
      return "Threads";
    case Launch::kRendezvousThreads:
      return "RendezvousThreads";
    case Launch::kProcesses:
      return "Processes";
  }
  return "";
}

using GroupBody = std::function<void(SymmetricGroup& group)>;

// Returns options for a small group; tests override those that they test.
inline GroupOptions group_options(int64_t size, int64_t rank = 0) {
  GroupOptions options;
  options.name = "test";
  options.rank = rank;
  options.size = size;
  options.workspace_bytes = int64_t{1} << 20;
  options.timeout = kHang;
  return options;
}

// Runs `body` on every rank of a new group. Each rank destroys the group when done.
inline std::vector<Outcome> run_group(Launch launch, const GroupOptions& options,
                                      const GroupBody& body) {
  if (launch == Launch::kThreads) {
    auto groups = SymmetricGroup::of_threads(options);
    return run_threads(options.size, [&](int64_t rank) {
      const auto own = std::move(groups[rank]);
      body(*own);
    });
  }
  InMemoryStore store;
  const auto rank_body = [&](int64_t rank) {
    auto own_options = options;
    own_options.rank = rank;
    const auto own = SymmetricGroup::rendezvous(own_options, store);
    body(*own);
  };
  return launch == Launch::kProcesses ? run_processes(options.size, rank_body)
                                      : run_threads(options.size, rank_body);
}

}  // namespace axonn::comm::testing
