// Ranks in separate processes, each with a runtime, for tests of what they share.
#pragma once

#include <cuda.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "gpu_machine/kernel_text.h"
#include "gpu_machine/runtime/runtime.h"

namespace axonn::gpu_machine::testing {

inline constexpr int kMostProcesses = 4;
inline constexpr size_t kSharedBytes = size_t{1} << 21;

// A page that all processes share, for other communication between them.
struct Board {
  struct Line {
    std::atomic<int> process = 0, descriptor = -1, steps = 0;
  };
  std::array<Line, kMostProcesses> lines;

  static Board& create() {
    void* const page =
        mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return *new (page) Board;
  }
};

// One process; its rank is also its device.
class Process {
 public:
  Process(Board& board, int its_rank, int its_size, const RuntimeOptions& options)
      : runtime(options), rank(its_rank), size(its_size), board_(board) {
    own().process = getpid();
    expect(cudaSetDevice(rank) == cudaSuccess, "cudaSetDevice");
  }

  // Failed expectations are reported at the end.
  void expect(bool is_so, const std::string& what) {
    if (!is_so) failures_ += "rank " + std::to_string(rank) + ": " + what + "\n";
  }
  void succeeds(CUresult error, const std::string& what) {
    expect(error == CUDA_SUCCESS, what + ": " + std::to_string(error));
  }
  // Expects that the machine has ended with an error that contains these words.
  void expect_failure(const std::string& words) {
    const auto& failure = runtime.failure();
    expect(failure && std::string(failure->what()).find(words) != std::string::npos, words);
    expects_failure_ = true;
  }
  const std::string& failures() {
    if (runtime.failure() && !expects_failure_) failures_ += runtime.failure()->what();
    return failures_;
  }

  // Waits until all processes reach this point.
  void meet() {
    const int step = ++own().steps;
    for (int other = 0; other < size; ++other) {
      while (line(other).steps < step) usleep(100);
    }
  }

  // --- Memory ---
  CUmemGenericAllocationHandle create() { return create_on(rank); }
  CUmemGenericAllocationHandle create_on(int device) {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle handle = 0;
    succeeds(cuMemCreate(&handle, kSharedBytes, &prop, 0), "cuMemCreate");
    return handle;
  }
  CUdeviceptr map(CUmemGenericAllocationHandle handle) {
    CUdeviceptr address = 0;
    succeeds(cuMemAddressReserve(&address, kSharedBytes, 0, 0, 0), "cuMemAddressReserve");
    succeeds(cuMemMap(address, kSharedBytes, 0, handle, 0), "cuMemMap");
    return address;
  }
  // Passes one process's object to all; the handles of the others are ignored.
  CUmemGenericAllocationHandle broadcast(CUmemGenericAllocationHandle handle, int from) {
    int descriptor = -1;
    if (rank == from) {
      succeeds(cuMemExportToShareableHandle(&descriptor, handle,
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
               "cuMemExportToShareableHandle");
      own().descriptor = descriptor;
    }
    meet();
    const std::string path = "/proc/" + std::to_string(line(from).process) + "/fd/" +
                             std::to_string(line(from).descriptor);
    const int passed = open(path.c_str(), O_RDWR | O_CLOEXEC);
    CUmemGenericAllocationHandle imported = 0;
    succeeds(cuMemImportFromShareableHandle(&imported,
                                            reinterpret_cast<void*>(static_cast<intptr_t>(passed)),
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
             "cuMemImportFromShareableHandle");
    close(passed);
    meet();
    if (rank == from) close(descriptor);
    return imported;
  }
  // Each process passes its own memory, and maps that of all. It is zero at first.
  std::vector<CUdeviceptr> map_all(CUmemGenericAllocationHandle own_memory) {
    std::vector<CUdeviceptr> addresses;
    for (int from = 0; from < size; ++from) {
      const auto handle = broadcast(own_memory, from);
      addresses.push_back(map(handle));
      succeeds(cuMemRelease(handle), "cuMemRelease");
    }
    return addresses;
  }
  void write(CUdeviceptr address, uint32_t value) {
    expect(cudaMemcpy(reinterpret_cast<void*>(address), &value, sizeof value,
                      cudaMemcpyHostToDevice) == cudaSuccess,
           "a copy to the device");
  }
  uint32_t read(CUdeviceptr address) {
    uint32_t value = 0;
    expect(cudaMemcpy(&value, reinterpret_cast<void*>(address), sizeof value,
                      cudaMemcpyDeviceToHost) == cudaSuccess,
           "a copy from the device");
    return value;
  }

  // Runs a kernel of one warp; the registers from %d10 on hold these addresses.
  void run(const std::vector<CUdeviceptr>& addresses, const std::string& body, uint32_t threads) {
    std::string loads;
    for (size_t i = 0; i < addresses.size(); ++i) {
      loads +=
          "ld.global.u64 %d" + std::to_string(10 + i) + ", [%out+" + std::to_string(8 * i) + "];\n";
    }
    const std::string name = "kernel" + std::to_string(++kernels_);
    std::string ptx = kernel_of(loads + body);
    ptx.replace(ptx.find(".entry test"), 11, ".entry " + name);
    Machine& machine = runtime.machine;
    machine.load(ptx);
    const uint64_t table =
        machine.put(std::vector<uint64_t>(addresses.begin(), addresses.end()), "addresses");
    machine.launch(runtime.resolve(nullptr)->stream, machine.kernel(name), {}, {threads, 1, 1},
                   table);
    (void)cudaDeviceSynchronize();
  }

  Runtime runtime;
  const int rank, size;

 private:
  Board::Line& line(int of_rank) { return board_.lines[static_cast<size_t>(of_rank)]; }
  Board::Line& own() { return line(rank); }

  Board& board_;
  std::string failures_;
  bool expects_failure_ = false;
  int kernels_ = 0;
};

inline RuntimeOptions of_process(int rank, double patience_seconds) {
  RuntimeOptions options;
  options.machine.seed = static_cast<uint64_t>(rank);
  options.machine.sleeps_for_real = true;
  options.machine.patience = std::numeric_limits<uint64_t>::max();
  options.devices = kMostProcesses;
  options.host_reaches_devices = rank % 2 == 0;
  options.patience = std::chrono::duration<double>(patience_seconds);
  return options;
}

// Runs `what` in `size` processes, and expects all of them to succeed.
inline void in_processes(int size, const std::function<void(Process&)>& what,
                         double patience_seconds = 30,
                         RemoteWrites remote_writes = RemoteWrites::kWork) {
  Board& board = Board::create();
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      RuntimeOptions options = of_process(rank, patience_seconds);
      options.remote_writes = remote_writes;
      Process process(board, rank, size, options);
      what(process);
      const std::string failures = process.failures();
      std::fputs(failures.c_str(), stderr);
      _exit(failures.empty() ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  munmap(&board, sizeof board);
}

}  // namespace axonn::gpu_machine::testing
