#include "core/symmetric/shared_segment.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "symmetric/ranks.h"

namespace axonn::comm {
namespace {

namespace fs = std::filesystem;
using testing::fork_child;
using testing::SharedArray;

int64_t num_descriptors() {
  return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
}

int64_t num_shm_entries() {
  std::error_code none;
  return std::distance(fs::directory_iterator("/dev/shm", none), fs::directory_iterator());
}

// Counts the processes of this machine that map or hold a segment with `name` in its name.
int64_t num_holders(const std::string& name) {
  int64_t holders = 0;
  std::error_code ignored;  // processes come and go while this runs
  for (const auto& process : fs::directory_iterator("/proc", ignored)) {
    if (process.path().filename().string().find_first_not_of("0123456789") != std::string::npos) {
      continue;
    }
    bool holds = false;
    std::ifstream maps(process.path() / "maps");
    for (std::string line; std::getline(maps, line);) {
      holds |= line.find(name) != std::string::npos;
    }
    for (fs::directory_iterator fd(process.path() / "fd", ignored), end; !ignored && fd != end;
         fd.increment(ignored)) {
      holds |= fs::read_symlink(fd->path(), ignored).string().find(name) != std::string::npos;
    }
    holders += holds;
  }
  return holders;
}

int64_t status_kib(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1));
  }
  return -1;
}

int exit_status(pid_t pid) {
  int status = 0;
  waitpid(pid, &status, 0);
  return status;
}

// Waits for the child to end, but leaves it as a zombie.
void await_end(pid_t pid) {
  siginfo_t info{};
  waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT);
}

void spin_until(const std::function<bool()>& done) {
  const testing::Timer timer;
  while (!done()) {
    if (timer.seconds() > testing::kHang.count())
      throw std::runtime_error("the other process never came");
    usleep(200);
  }
}

TEST(SharedSegment, StartsAsZeros) {
  const auto segment = SharedSegment::create("test", 1 << 20);
  EXPECT_EQ(segment.size(), 1 << 20);
  EXPECT_TRUE(std::all_of(segment.data(), segment.data() + segment.size(),
                          [](std::byte byte) { return byte == std::byte{0}; }));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(segment.data()) % 4096, 0u);
}

TEST(SharedSegment, AnotherProcessSeesWhatIsWritten) {
  const auto segment = SharedSegment::create("test", 4096);
  const pid_t parent = getpid();
  const pid_t child = fork_child([&] {
    const auto peer = SharedSegment::open(parent, segment.fd(), segment.nonce(), 4096);
    ASSERT_NE(peer.data(), segment.data());  // a new mapping, not the inherited one
    spin_until(
        [&] { return std::to_integer<int>(static_cast<volatile std::byte*>(peer.data())[7]); });
    EXPECT_EQ(peer.data()[7], std::byte{42});
    EXPECT_EQ(peer.fd(), -1);
  });
  segment.data()[7] = std::byte{42};
  EXPECT_EQ(exit_status(child), 0);
}

// Only the creator writes; a stray write by a peer must not go unnoticed.
TEST(SharedSegment, PeersCannotWrite) {
  const auto segment = SharedSegment::create("test", 4096);
  const pid_t parent = getpid();
  const pid_t child = fork_child([&] {
    signal(SIGSEGV, SIG_DFL);  // the sanitizers' handlers would turn it into an exit
    const auto peer = SharedSegment::open(parent, segment.fd(), segment.nonce(), 4096);
    *static_cast<volatile std::byte*>(peer.data()) = std::byte{1};
  });
  const int status = exit_status(child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
  EXPECT_EQ(segment.data()[0], std::byte{0});
}

TEST(SharedSegment, TakesMemoryOnlyWhereTouched) {
  const int64_t bytes = int64_t{16} << 30;
  const int64_t resident_before = status_kib("RssShmem");
  const auto segment = SharedSegment::create("test", bytes);
  struct stat status{};
  ASSERT_EQ(fstat(segment.fd(), &status), 0);
  EXPECT_EQ(status.st_blocks, 0);
  segment.data()[bytes - 1] = std::byte{1};
  segment.data()[bytes / 2] = std::byte{1};
  ASSERT_EQ(fstat(segment.fd(), &status), 0);
  EXPECT_GT(status.st_blocks, 0);
  EXPECT_LE(status.st_blocks * 512, 4 << 20);  // two pages, in case they are huge ones
  EXPECT_LE(status_kib("RssShmem") - resident_before, 4 << 10);
}

TEST(SharedSegment, SurvivesItsCreatorWhileMapped) {
  const SharedArray<std::atomic<int>> shared(2);  // the child's descriptor; "you may go"
  const SharedArray<std::atomic<uint64_t>> nonce(1);
  const pid_t child = fork_child([&] {
    const auto segment = SharedSegment::create("test", 4096);
    segment.data()[100] = std::byte{99};
    nonce[0] = segment.nonce();
    shared[0] = segment.fd();
    spin_until([&] { return shared[1] != 0; });
  });
  spin_until([&] { return shared[0] != 0; });
  const auto segment = SharedSegment::open(child, shared[0], nonce[0], 4096);
  shared[1] = 1;
  EXPECT_EQ(exit_status(child), 0);
  EXPECT_EQ(segment.data()[100], std::byte{99});
}

TEST(SharedSegment, KillNineLeavesNothingBehind) {
  const std::string name = "axonn-kill-" + std::to_string(getpid());
  const int64_t descriptors = num_descriptors();
  const int64_t shm_entries = num_shm_entries();
  const SharedArray<std::atomic<int>> ready(2);
  const SharedArray<std::atomic<uint64_t>> nonce(1);
  const pid_t creator = fork_child([&] {
    const auto segment = SharedSegment::create(name, 8 << 20);
    nonce[0] = segment.nonce();
    std::fill_n(segment.data(), segment.size(), std::byte{1});
    ready[0] = segment.fd();
    pause();
  });
  spin_until([&] { return ready[0] != 0; });
  const pid_t reader = fork_child([&] {
    const auto segment = SharedSegment::open(creator, ready[0], nonce[0], 8 << 20);
    ready[1] = 1;
    pause();
  });
  spin_until([&] { return ready[1] != 0; });
  EXPECT_EQ(num_holders(name), 2);
  for (const pid_t pid : {creator, reader}) {
    kill(pid, SIGKILL);
    exit_status(pid);
  }
  EXPECT_EQ(num_holders(name), 0);
  EXPECT_EQ(num_descriptors(), descriptors);
  EXPECT_LE(num_shm_entries(), shm_entries);
}

TEST(SharedSegment, ClosesItsDescriptor) {
  const int64_t before = num_descriptors();
  {
    auto segment = SharedSegment::create("test", 4096);
    EXPECT_EQ(num_descriptors(), before + 1);
    const auto peer = SharedSegment::open(getpid(), segment.fd(), segment.nonce(), 4096);
    EXPECT_EQ(num_descriptors(), before + 1);
    const auto moved = std::move(segment);
    EXPECT_EQ(num_descriptors(), before + 1);
    moved.data()[5] = std::byte{3};
    EXPECT_EQ(peer.data()[5], std::byte{3});
  }
  EXPECT_EQ(num_descriptors(), before);
}

TEST(SharedSegment, ErrorsNameTheCallAndLeakNothing) {
  const int64_t before = num_descriptors();
  const auto expect_error = [](const std::function<void()>& body, const std::string& part) {
    testing::expect_contains(testing::error_of(body), {part});
  };
  expect_error([] { SharedSegment::create("test", -1); }, "cannot size a shared-memory segment");
  expect_error([] { SharedSegment::create("test", int64_t{1} << 60); }, "bytes of address space");
  expect_error([] { SharedSegment::open(getpid(), 9999, 0, 4096); }, "/fd/9999");
  const auto segment = SharedSegment::create("test", 4096);
  expect_error([&] { SharedSegment::open(getpid(), segment.fd(), segment.nonce(), 8192); },
               "has 4096 bytes, expected 8192");
  EXPECT_EQ(num_descriptors(), before + 1);
}

// On a clone of the peer's host, the peer's process and descriptor name a segment of this host.
TEST(SharedSegment, IsNotTakenForThatOfAClone) {
  const int64_t before = num_descriptors();
  const auto own = SharedSegment::create("test", 4096), other = SharedSegment::create("test", 4096);
  ASSERT_NE(own.nonce(), other.nonce());
  for (const auto access : {SharedSegment::Access::kRead, SharedSegment::Access::kWrite}) {
    testing::expect_contains(testing::error_of([&] {
                               SharedSegment::open(getpid(), own.fd(), other.nonce(), 4096, access);
                             }),
                             {"is other memory than the peer's", "clone"});
  }
  EXPECT_EQ(num_descriptors(), before + 2);
}

TEST(ProcessWatch, SeesEveryKindOfEnd) {
  EXPECT_TRUE(ProcessWatch(getpid()).alive());
  for (const bool killed : {false, true}) {
    const SharedArray<std::atomic<int>> go(1);
    const pid_t child = fork_child([&] { spin_until([&] { return go[0] != 0; }); });
    const ProcessWatch watch(child);
    EXPECT_TRUE(watch.alive());
    if (killed) {
      kill(child, SIGKILL);
    } else {
      go[0] = 1;
    }
    await_end(child);
    EXPECT_FALSE(watch.alive()) << "a zombie, killed: " << killed;
    EXPECT_FALSE(ProcessWatch(child).alive()) << "watched only as a zombie";
    exit_status(child);
    EXPECT_FALSE(watch.alive()) << "reaped";
    EXPECT_FALSE(ProcessWatch(child).alive()) << "watched only after it was reaped";
  }
}

TEST(ProcessWatch, AStoppedProcessIsAlive) {
  const pid_t child = fork_child([] { pause(); });
  const ProcessWatch watch(child);
  kill(child, SIGSTOP);
  siginfo_t info{};
  waitid(P_PID, static_cast<id_t>(child), &info, WSTOPPED | WNOWAIT);
  EXPECT_TRUE(watch.alive());
  kill(child, SIGKILL);
  exit_status(child);
  EXPECT_FALSE(watch.alive());
}

TEST(HostIdentity, IsEqualAcrossAFork) {
  const std::string own = host_identity();
  EXPECT_EQ(own.find('\n'), std::string::npos);
  EXPECT_GT(own.size(), 10u);
  EXPECT_EQ(exit_status(fork_child([&] { EXPECT_EQ(host_identity(), own); })), 0);
}

}  // namespace
}  // namespace axonn::comm
