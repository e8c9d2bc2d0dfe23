// Ranks in separate processes.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <numeric>

#include "core/cuda/check.h"
#include "core/cuda/nccl/nccl.h"
#include "gpu_machine/runtime/nccl/communicators.h"

namespace axonn::gpu_machine::nccl {
namespace {

constexpr size_t kCount = 1000;

// A rank's communicator of all ranks, and memory for a call.
struct Rank {
  Rank(const std::string& folder, int its_rank, int its_size, const ncclUniqueId& id)
      : runtime(options_of(folder, its_rank)), rank(its_rank), size(its_size) {
    void* memory = nullptr;
    AXONN_CUDA_CHECK(cudaMalloc(&memory, kCount * sizeof(float) * static_cast<size_t>(size)));
    values = static_cast<float*>(memory);
    AXONN_NCCL_CHECK(ncclCommInitRank(&comm, size, id, rank));
    AXONN_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }

  static RuntimeOptions options_of(const std::string& folder, int rank) {
    RuntimeOptions options;
    options.machine.seed = static_cast<uint64_t>(rank);
    options.devices = 1;
    options.host_reaches_devices = true;
    options.wire_folder = folder;
    options.patience = std::chrono::seconds(30);
    return options;
  }
  void fill(float value) { std::fill_n(values, kCount * static_cast<size_t>(size), value); }
  bool all_are(float* from, size_t count, float value) {
    AXONN_CUDA_CHECK(cudaStreamSynchronize(stream));
    return std::all_of(from, from + count, [&](float v) { return v == value; });
  }

  Runtime runtime;
  int rank, size;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  float* values = nullptr;
};

// Runs a function on each rank, in separate processes; expects that it returns true.
void on_ranks(int size, const std::function<bool(Rank&)>& what) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("wire" + std::to_string(getpid()));
  ncclUniqueId id;
  {
    Runtime runtime(Rank::options_of(folder, 0));
    AXONN_NCCL_CHECK(ncclGetUniqueId(&id));
  }
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      Rank own(folder, rank, size, id);
      _exit(what(own) ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  fs::remove_all(folder);
}

TEST(Wire, SumsAndGathersOfProcesses) {
  on_ranks(3, [](Rank& r) {
    bool right = true;
    for (int call = 0; call < 5; ++call) {
      r.fill(static_cast<float>(r.rank + call));
      (void)ncclAllReduce(r.values, r.values, kCount, ncclFloat32, ncclSum, r.comm, r.stream);
      right = right && r.all_are(r.values, kCount, static_cast<float>(3 + 3 * call));
      float* const own = r.values + kCount * static_cast<size_t>(r.rank);
      std::fill_n(own, kCount, static_cast<float>(r.rank));
      (void)ncclAllGather(own, r.values, kCount, ncclFloat32, r.comm, r.stream);
      for (int other = 0; other < r.size; ++other) {
        float* const part = r.values + kCount * static_cast<size_t>(other);
        right = right && r.all_are(part, kCount, static_cast<float>(other));
      }
    }
    return right;
  });
}

TEST(Wire, TransfersAndPartsOfProcesses) {
  on_ranks(4, [](Rank& r) {
    r.fill(static_cast<float>(r.rank));
    (void)ncclGroupStart();
    (void)ncclSend(r.values, kCount, ncclFloat32, (r.rank + 1) % 4, r.comm, r.stream);
    (void)ncclRecv(r.values + kCount, kCount, ncclFloat32, (r.rank + 3) % 4, r.comm, r.stream);
    (void)ncclGroupEnd();
    bool right = r.all_are(r.values + kCount, kCount, static_cast<float>((r.rank + 3) % 4));
    ncclComm_t part = nullptr;
    (void)ncclCommSplit(r.comm, r.rank % 2, -r.rank, &part, nullptr);
    int rank = -1;
    (void)ncclCommUserRank(part, &rank);
    right = right && rank == (r.rank < 2 ? 1 : 0);
    (void)ncclAllReduce(r.values, r.values, kCount, ncclFloat32, ncclMax, part, r.stream);
    return right && r.all_are(r.values, kCount, static_cast<float>(2 + r.rank % 2));
  });
}

}  // namespace
}  // namespace axonn::gpu_machine::nccl
