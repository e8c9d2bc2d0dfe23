// Memory and multicast objects that processes share as file descriptors.
#include "gpu_machine/runtime/process_case.h"

namespace axonn::gpu_machine::testing {
namespace {

TEST(Processes, ReachEachOthersMemory) {
  in_processes(2, [](Process& p) {
    const auto memory = p.create();
    const auto all = p.map_all(memory);
    const CUdeviceptr own = all[static_cast<size_t>(p.rank)];
    const CUdeviceptr other = all[static_cast<size_t>(1 - p.rank)];
    p.write(other + 64, 7 + static_cast<uint32_t>(p.rank));
    p.meet();
    p.expect(p.read(own + 64) == 8 - static_cast<uint32_t>(p.rank), "the other's word is there");
    if (p.runtime.options.host_reaches_devices) {
      const auto* word = reinterpret_cast<const uint32_t*>(own + 64);
      p.expect(*word == 8, "the host sees it at its address");
    }
    // Memory lives as long as the process uses it, under any of its addresses.
    const CUdeviceptr again = p.map(memory);
    p.succeeds(cuMemRelease(memory), "cuMemRelease");
    p.succeeds(cuMemUnmap(own, kSharedBytes), "cuMemUnmap");
    p.expect(p.read(again + 64) == 8 - static_cast<uint32_t>(p.rank), "it is still there");
    const Region* region = p.runtime.machine.region_at(again);
    p.succeeds(cuMemUnmap(again, kSharedBytes), "cuMemUnmap");
    p.expect(region->freed, "this process has given its part back");
    p.meet();
    p.expect(p.read(other + 64) == 7 + static_cast<uint32_t>(p.rank), "the other's is there");
  });
}

TEST(Processes, WaitForEachOthersFlags) {
  // Each rank writes a word for the next rank, raises its flag, and waits for its own flag.
  const std::string body = R"(
  mov.u32 %r1, 1;
ROUND:
  st.global.u32 [%d11+256], %r1;
  st.release.sys.global.u32 [%d11], %r1;
WAIT:
  nanosleep.u32 64;
  ld.acquire.sys.global.u32 %r2, [%d10];
  setp.lt.u32 %p1, %r2, %r1;
  @%p1 bra WAIT;
  ld.global.u32 %r3, [%d10+256];
  setp.lt.u32 %p1, %r3, %r1;
  @%p1 trap;
  add.u32 %r1, %r1, 1;
  setp.le.u32 %p1, %r1, 50;
  @%p1 bra ROUND;
)";
  in_processes(3, [&](Process& p) {
    const auto all = p.map_all(p.create());
    const auto own = static_cast<size_t>(p.rank), next = (own + 1) % all.size();
    p.meet();
    p.run({all[own], all[next]}, body, 1);
    p.expect(p.read(all[own]) == 50, "all rounds are over");
  });
}

TEST(Processes, StreamsWaitForWordsOfOthers) {
  in_processes(2, [](Process& p) {
    const auto all = p.map_all(p.create());
    const auto own = static_cast<size_t>(p.rank);
    for (uint32_t step = 1; step <= 20; ++step) {
      p.succeeds(cuStreamWriteValue32(nullptr, all[1 - own], step, 0), "cuStreamWriteValue32");
      p.succeeds(cuStreamWaitValue32(nullptr, all[own], step, CU_STREAM_WAIT_VALUE_GEQ),
                 "cuStreamWaitValue32");
    }
    p.expect(cudaDeviceSynchronize() == cudaSuccess, "all is over");
  });
}

TEST(Processes, NoUpdateIsLost) {
  const std::string body = R"(
  mov.u32 %r1, 0;
AGAIN:
  atom.add.relaxed.sys.global.u32 %r2, [%d10], 1;
  red.add.relaxed.sys.global.u64 [%d10+64], 3;
  add.u32 %r1, %r1, 1;
  setp.lt.u32 %p1, %r1, 200;
  @%p1 bra AGAIN;
)";
  in_processes(4, [&](Process& p) {
    const auto all = p.map_all(p.create());
    p.meet();
    p.run({all[0]}, body, 32);
    p.meet();
    p.expect(p.read(all[0]) == 4 * 32 * 200, "each thread's additions");
    p.expect(p.read(all[0] + 64) == 3 * 4 * 32 * 200, "each thread's reductions");
  });
}

// A wait longer than the patience is no deadlock while its warp sleeps and time passes.
TEST(Processes, AWaitTakesItsTime) {
  const std::string body = R"(
  mov.u64 %d1, %globaltimer;
WAIT:
  nanosleep.u32 1000;
  ld.acquire.sys.global.u32 %r2, [%d10];
  mov.u64 %d2, %globaltimer;
  sub.u64 %d2, %d2, %d1;
  setp.gt.u64 %p2, %d2, 400000000;
  @%p2 bra LATE;
  setp.eq.u32 %p1, %r2, 0;
  @%p1 bra WAIT;
LATE:
  st.global.u64 [%d10+64], %d2;
)";
  in_processes(
      2,
      [&](Process& p) {
        const auto all = p.map_all(p.create());
        const auto begin = std::chrono::steady_clock::now();
        if (p.rank == 0) p.run({all[0]}, body, 1);
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
        if (p.rank == 0) p.expect(waited.count() > 0.3, "the host's time has passed, too");
        if (p.rank == 0) p.expect(p.read(all[0] + 64) > 400'000'000, "it has given up");
      },
      0.1);
}

// --- Multicast -----------------------------------------------------------------------------------

CUmemGenericAllocationHandle multicast_of(Process& p, size_t bytes) {
  CUmulticastObjectProp prop{};
  prop.numDevices = static_cast<unsigned>(p.size);
  prop.size = bytes;
  prop.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle handle = 0;
  if (p.rank == 0) p.succeeds(cuMulticastCreate(&handle, &prop), "cuMulticastCreate");
  return p.broadcast(handle, 0);
}

TEST(Processes, AMulticastAddressReachesAll) {
  const std::string add = R"(
  mov.u32 %r1, 0;
AGAIN:
  multimem.red.relaxed.sys.global.add.u32 [%d10], 1;
  add.u32 %r1, %r1, 1;
  setp.lt.u32 %p1, %r1, 50;
  @%p1 bra AGAIN;
)";
  const std::string sum = R"(
  multimem.ld_reduce.relaxed.sys.global.add.u32 %r1, [%d10+64];
  st.global.u32 [%d11+128], %r1;
)";
  in_processes(3, [&](Process& p) {
    const auto memory = p.create(), multicast = multicast_of(p, kSharedBytes);
    p.succeeds(cuMulticastAddDevice(multicast, p.rank), "cuMulticastAddDevice");
    // Waits for the devices of the other processes.
    p.succeeds(p.rank == 1 ? cuMulticastBindAddr(multicast, 0, p.map(memory), kSharedBytes, 0)
                           : cuMulticastBindMem(multicast, 0, memory, 0, kSharedBytes, 0),
               "cuMulticastBindMem");
    const CUdeviceptr all = p.map(multicast), own = p.map(memory);
    p.write(own + 64, 10 + static_cast<uint32_t>(p.rank));
    p.meet();
    p.run({all}, add, 4);
    p.run({all, own}, sum, 1);
    p.meet();
    p.expect(p.read(own) == 3 * 4 * 50, "what all have added");
    p.expect(p.read(own + 128) == 10 + 11 + 12, "the sum of what all have");
    p.meet();
    if (p.rank == 2) p.run({all}, "multimem.st.relaxed.sys.global.u32 [%d10+192], 9;\n", 1);
    p.meet();
    p.expect(p.read(own + 192) == 9, "what one has stored");
    p.succeeds(cuMemUnmap(all, kSharedBytes), "cuMemUnmap");
    p.succeeds(cuMulticastUnbind(multicast, p.rank, 0, kSharedBytes), "cuMulticastUnbind");
    p.expect(cuMulticastUnbind(multicast, p.rank, 0, kSharedBytes) == CUDA_ERROR_INVALID_VALUE,
             "it is bound no more");
    p.succeeds(cuMulticastBindMem(multicast, 0, memory, 0, kSharedBytes, 0), "bound again");
    p.succeeds(cuMemRelease(multicast), "cuMemRelease");
  });
}

TEST(Processes, ATeamThatStaysIncompleteIsADeadlock) {
  in_processes(
      2,
      [](Process& p) {
        const auto memory = p.create(), multicast = multicast_of(p, kSharedBytes);
        if (p.rank == 1) return;
        p.succeeds(cuMulticastAddDevice(multicast, 0), "cuMulticastAddDevice");
        p.expect(cuMulticastBindMem(multicast, 0, memory, 0, kSharedBytes, 0) != CUDA_SUCCESS,
                 "the other device is missing");
        p.expect_failure("a multicast object waits for its devices");
      },
      0.2);
}

TEST(Processes, MisuseIsRefused) {
  in_processes(1, [](Process& p) {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    CUmemGenericAllocationHandle memory = 0, imported = 0;
    p.succeeds(cuMemCreate(&memory, kSharedBytes, &prop, 0), "cuMemCreate");
    int descriptor = -1;
    constexpr auto kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    p.expect(cuMemExportToShareableHandle(&descriptor, memory, kDescriptor, 0) ==
                 CUDA_ERROR_INVALID_VALUE,
             "it was not made to be shared");
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC;
    p.expect(cuMemCreate(&memory, kSharedBytes, &prop, 0) == CUDA_ERROR_NOT_SUPPORTED,
             "there is no fabric");
    const int other = memfd_create("of somebody else", MFD_CLOEXEC);
    p.expect(ftruncate(other, 4096) == 0, "ftruncate");
    p.expect(cuMemImportFromShareableHandle(&imported,
                                            reinterpret_cast<void*>(static_cast<intptr_t>(other)),
                                            kDescriptor) == CUDA_ERROR_INVALID_VALUE,
             "it is no memory of a device");
    p.expect(close(other) == 0, "close");
    p.expect(cuMemImportFromShareableHandle(&imported,
                                            reinterpret_cast<void*>(static_cast<intptr_t>(other)),
                                            kDescriptor) == CUDA_ERROR_INVALID_VALUE,
             "it is closed");
    int value = 0;
    p.succeeds(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 0), "asked");
    p.expect(value == 1, "there is multicast");
  });
}

}  // namespace
}  // namespace axonn::gpu_machine::testing
