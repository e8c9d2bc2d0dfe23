// The functions of nccl.h.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <utility>

#include "gpu_machine/runtime/nccl/communicators.h"

using axonn::gpu_machine::Runtime;
using axonn::gpu_machine::RuntimeLock;
using axonn::gpu_machine::nccl::Call;
using axonn::gpu_machine::nccl::CommPtr;
using axonn::gpu_machine::nccl::Kind;
using axonn::gpu_machine::nccl::Nccl;

namespace {

// Wraps a function: counts the call, injects its error and lets the machine run. An error within a
// group also becomes the group's error.
template <typename Function>
ncclResult_t api(const char* name, Function&& function) {
  Runtime& runtime = Runtime::current();
  const RuntimeLock lock(runtime);
  Nccl& nccl = Nccl::current();
  const int injected = runtime.count_call(name);
  if (runtime.failure()) return nccl.fail_group(ncclUnhandledCudaError);
  if (injected != 0) return nccl.fail_group(static_cast<ncclResult_t>(injected));
  runtime.give_some_turns();
  if (runtime.failure()) return nccl.fail_group(ncclUnhandledCudaError);
  return nccl.fail_group(std::forward<Function>(function)(nccl));
}

// The same for a function that takes a communicator.
template <typename Function>
ncclResult_t api_of(const char* name, ncclComm_t comm, Function&& function) {
  return api(name, [&](Nccl& nccl) {
    if (comm == nullptr) return nccl.refuse(ncclInvalidArgument, "a communicator is null");
    const CommPtr found = nccl.find(comm, name);
    return found == nullptr ? ncclInvalidUsage : std::forward<Function>(function)(nccl, *found);
  });
}

ncclResult_t call(const char* name, ncclComm_t comm, const Call& what) {
  return api_of(name, comm,
                [&](Nccl& nccl, ncclComm& of_rank) { return nccl.call(of_rank, what); });
}

}  // namespace

extern "C" {

// --- Communicators ----------------------------------------------------------------

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return api("ncclGetUniqueId", [&](Nccl& nccl) { return nccl.unique_id(*id); });
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return api("ncclCommInitRankConfig",
             [&](Nccl& nccl) { return nccl.init(comm, size, id, rank, config); });
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return api("ncclCommInitRank",
             [&](Nccl& nccl) { return nccl.init(comm, size, id, rank, nullptr); });
}
ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
  return api("ncclCommInitAll", [&](Nccl& nccl) { return nccl.init_all(comms, count, devices); });
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int colour, int key, ncclComm_t* made,
                           ncclConfig_t* config) {
  return api_of("ncclCommSplit", comm, [&](Nccl& nccl, ncclComm& parent) {
    return nccl.split(parent, colour, key, made, config);
  });
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return api_of("ncclCommFinalize", comm,
                [](Nccl& nccl, ncclComm& found) { return nccl.finalize(found); });
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return api_of("ncclCommDestroy", comm,
                [](Nccl& nccl, ncclComm& found) { return nccl.destroy(found); });
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return api_of("ncclCommAbort", comm,
                [](Nccl& nccl, ncclComm& found) { return nccl.abort(found); });
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  return api_of("ncclCommGetAsyncError", comm,
                [&](Nccl& nccl, ncclComm& found) { return nccl.async_error(found, *state); });
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return api_of("ncclCommCount", comm, [&](Nccl&, ncclComm& found) {
    *count = found.clique->size;
    return ncclSuccess;
  });
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return api_of("ncclCommCuDevice", comm, [&](Nccl&, ncclComm& found) {
    *device = found.device;
    return ncclSuccess;
  });
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return api_of("ncclCommUserRank", comm, [&](Nccl&, ncclComm& found) {
    *rank = found.rank;
    return ncclSuccess;
  });
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}
const char* ncclGetLastError(ncclComm_t) {
  thread_local std::string text;
  Runtime& runtime = Runtime::current();
  const RuntimeLock lock(runtime);
  const auto& failure = runtime.failure();
  text = failure ? failure->what() : Nccl::current().last_error();
  return text.c_str();
}

// --- Calls ------------------------------------------------------------------------

ncclResult_t ncclGroupStart() {
  return api("ncclGroupStart", [](Nccl& nccl) { return nccl.group_start(); });
}
// A group ends even if ncclGroupEnd fails.
ncclResult_t ncclGroupEnd() {
  Runtime& runtime = Runtime::current();
  const RuntimeLock lock(runtime);
  Nccl& nccl = Nccl::current();
  const int injected = runtime.count_call("ncclGroupEnd");
  if (injected != 0) (void)nccl.fail_group(static_cast<ncclResult_t>(injected));
  runtime.give_some_turns();
  if (runtime.failure()) (void)nccl.fail_group(ncclUnhandledCudaError);
  return nccl.group_end();
}

ncclResult_t ncclAllGather(const void* input, void* output, size_t count, ncclDataType_t dtype,
                           ncclComm_t comm, cudaStream_t stream) {
  return call(
      "ncclAllGather", comm,
      {Kind::kAllGather, input, output, static_cast<int64_t>(count), dtype, ncclSum, -1, stream});
}
ncclResult_t ncclReduceScatter(const void* input, void* output, size_t count, ncclDataType_t dtype,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return call(
      "ncclReduceScatter", comm,
      {Kind::kReduceScatter, input, output, static_cast<int64_t>(count), dtype, op, -1, stream});
}
ncclResult_t ncclAllReduce(const void* input, void* output, size_t count, ncclDataType_t dtype,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return call(
      "ncclAllReduce", comm,
      {Kind::kAllReduce, input, output, static_cast<int64_t>(count), dtype, op, -1, stream});
}
ncclResult_t ncclBroadcast(const void* input, void* output, size_t count, ncclDataType_t dtype,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return call(
      "ncclBroadcast", comm,
      {Kind::kBroadcast, input, output, static_cast<int64_t>(count), dtype, ncclSum, root, stream});
}
ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return ncclBroadcast(data, data, count, dtype, root, comm, stream);
}
ncclResult_t ncclReduce(const void* input, void* output, size_t count, ncclDataType_t dtype,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return call("ncclReduce", comm,
              {Kind::kReduce, input, output, static_cast<int64_t>(count), dtype, op, root, stream});
}
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
ncclResult_t ncclAlltoAll(const void* input, void* output, size_t count, ncclDataType_t dtype,
                          ncclComm_t comm, cudaStream_t stream) {
  return call(
      "ncclAlltoAll", comm,
      {Kind::kAllToAll, input, output, static_cast<int64_t>(count), dtype, ncclSum, -1, stream});
}
#endif
ncclResult_t ncclSend(const void* input, size_t count, ncclDataType_t dtype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return call(
      "ncclSend", comm,
      {Kind::kSend, input, nullptr, static_cast<int64_t>(count), dtype, ncclSum, peer, stream});
}
ncclResult_t ncclRecv(void* output, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return call(
      "ncclRecv", comm,
      {Kind::kReceive, nullptr, output, static_cast<int64_t>(count), dtype, ncclSum, peer, stream});
}

}  // extern "C"
