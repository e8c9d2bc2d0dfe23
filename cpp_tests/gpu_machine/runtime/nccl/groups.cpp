// Groups of calls: the calls between ncclGroupStart and ncclGroupEnd are checked, launched into
// streams and captured into graphs as one.
#include <algorithm>
#include <utility>

#include "gpu_machine/runtime/nccl/kernel.h"

namespace axonn::gpu_machine::nccl {
namespace {

constexpr uint32_t kLongestDelay = 24;  // turns until a thread of NCCL does its job

struct Range {
  const char* begin;
  const char* end;
};

bool overlap(Range a, Range b) { return a.begin < b.end && b.begin < a.end; }

// What a call reads and writes on a rank.
Range input_of(const Call& call, int rank, int ranks) {
  const bool reads_all = call.kind == Kind::kReduceScatter || call.kind == Kind::kAllToAll;
  const bool reads =
      call.kind != Kind::kReceive && (call.kind != Kind::kBroadcast || call.peer == rank);
  const auto* begin = static_cast<const char*>(call.input);
  return {begin, begin + (reads ? call.count * size_of(call.dtype) * (reads_all ? ranks : 1) : 0)};
}
Range output_of(const Call& call, int rank, int ranks) {
  const bool writes_all = call.kind == Kind::kAllGather || call.kind == Kind::kAllToAll;
  const bool writes = call.kind != Kind::kSend && (call.kind != Kind::kReduce || call.peer == rank);
  const auto* begin = static_cast<const char*>(call.output);
  return {begin,
          begin + (writes ? call.count * size_of(call.dtype) * (writes_all ? ranks : 1) : 0)};
}

// Whether input and output overlap in a way that NCCL does not allow.
bool overlaps_wrongly(const Call& call, int rank, int ranks) {
  const Range input = input_of(call, rank, ranks), output = output_of(call, rank, ranks);
  if (!overlap(input, output)) return false;
  const int64_t own = rank * call.count * size_of(call.dtype);
  if (call.kind == Kind::kAllGather) return input.begin != output.begin + own;
  if (call.kind == Kind::kReduceScatter) return output.begin != input.begin + own;
  return call.kind == Kind::kAllToAll || input.begin != output.begin;
}

}  // namespace

Group& Nccl::group() {
  thread_local Group group;
  if (group.of != this) group = Group{this, 0, ncclSuccess, {}, {}};
  return group;
}

ncclResult_t Nccl::group_start() {
  ++group().depth;
  return ncclSuccess;
}

ncclResult_t Nccl::fail_group(ncclResult_t result) {
  const bool is_error = result != ncclSuccess && result != ncclInProgress;
  if (is_error && group().depth > 0 && group().error == ncclSuccess) group().error = result;
  return result;
}

ncclResult_t Nccl::call(ncclComm& comm, const Call& call) {
  if (const ncclResult_t result = check_usable(comm, describe(call).c_str())) return result;
  const int size = comm.clique->size;
  const bool has_peer =
      call.is_transfer() || call.kind == Kind::kBroadcast || call.kind == Kind::kReduce;
  if (size_of(call.dtype) == 0 || (has_peer && (call.peer < 0 || call.peer >= size))) {
    return refuse(ncclInvalidArgument, describe(call) + " of " + comm.name() + " is invalid");
  }
  if (overlaps_wrongly(call, comm.rank, size)) {
    return misuse(describe(call) + " of " + comm.name() + ": input and output overlap");
  }
  if (call.count == 0 && !call.is_transfer()) return ncclSuccess;
  (void)group_start();
  group().calls.emplace_back(comm.shared_from_this(), call);
  return group_end();
}

ncclResult_t Nccl::group_end() {
  if (group().depth == 0) return misuse("ncclGroupEnd without ncclGroupStart");
  if (--group().depth > 0) return ncclSuccess;
  Group done = std::exchange(group(), Group{this, 0, ncclSuccess, {}, {}});
  if (done.error != ncclSuccess) return done.error;
  return carry_out(std::move(done));
}

ncclResult_t Nccl::carry_out(Group done) {
  bool some_block = false, some_do_not = false, is_end = false;
  const auto note = [&](const CommPtr& comm) {
    (comm->config.blocking ? some_block : some_do_not) = true;
  };
  for (const Job& job : done.jobs) {
    job.always_blocks ? void(is_end = true) : note(job.comm);
  }
  std::vector<CommPtr> comms;  // in the order of their first calls
  std::vector<std::vector<Call>> calls;
  for (const auto& [comm, call] : done.calls) {
    note(comm);
    const auto found = std::find(comms.begin(), comms.end(), comm);
    const auto place = static_cast<size_t>(found - comms.begin());
    if (found == comms.end()) {
      comms.push_back(comm);
      calls.emplace_back();
    }
    calls[place].push_back(call);
  }
  if (some_block && some_do_not) {
    return refuse(ncclInvalidArgument,
                  "a group has communicators that block and others that do not");
  }
  if (some_do_not && !is_end) {
    for (Job& job : done.jobs) {
      job.delay = static_cast<int>(runtime.machine.draw(kLongestDelay));
      job.comm->async = ncclInProgress;
      jobs_.push_back(std::move(job));
    }
    for (size_t i = 0; i < comms.size(); ++i) {
      comms[i]->async = ncclInProgress;
      Job job;
      job.comm = comms[i];
      job.delay = static_cast<int>(runtime.machine.draw(kLongestDelay));
      job.attempt = [this, comm = comms[i], its = calls[i]]() -> std::optional<ncclResult_t> {
        if (!are_connected(*comm, its)) return std::nullopt;
        return launch(comm, its);
      };
      jobs_.push_back(std::move(job));
    }
    return comms.empty() && done.jobs.empty() ? ncclSuccess : ncclInProgress;
  }
  ncclResult_t first = ncclSuccess;
  for (Job& job : done.jobs) {
    const auto is_over = [&] {
      std::optional<ncclResult_t> result;
      // Later jobs proceed as well: the ranks of one thread wait for each other.
      for (Job& one : done.jobs) {
        if (one.attempt == nullptr) continue;
        result = one.attempt();
        if (!result) continue;
        one.attempt = nullptr;
        if (!one.always_blocks) one.comm->async = *result;
        if (*result != ncclSuccess && first == ncclSuccess) first = *result;
      }
      return job.attempt == nullptr;
    };
    if (runtime.wait_until(is_over, job.waits_for) != cudaSuccess) return ncclUnhandledCudaError;
  }
  for (size_t i = 0; i < comms.size(); ++i) {
    const ncclResult_t result = launch(comms[i], calls[i]);
    if (first == ncclSuccess) first = result;
  }
  return first;
}

bool Nccl::are_connected(const ncclComm& comm, const std::vector<Call>& calls) const {
  Clique& clique = *comm.clique;
  if (!clique.connects_late) return true;
  bool all = true;
  for (const Call& call : calls) {
    if (!call.is_transfer()) {
      clique.connecting.insert(comm.rank);
      all = all && static_cast<int>(clique.connecting.size()) == clique.size;
    } else if (call.peer != comm.rank) {
      auto& ends = clique.to_connect[std::minmax(comm.rank, call.peer)];
      ends.insert(comm.rank);
      all = all && ends.size() == 2;
    }
  }
  return all;
}

ncclResult_t Nccl::launch(const CommPtr& comm, const std::vector<Call>& calls) {
  cudaStream_t stream = calls.front().stream;
  std::map<int, int> own;  // sends to this rank itself, minus receives from it
  for (const Call& call : calls) {
    if (call.stream != stream) {
      return misuse("calls of one group on several streams, which NCCL in software does not know");
    }
    if (call.is_transfer() && call.peer == comm->rank) {
      own[0] += call.kind == Kind::kSend ? 1 : -1;
    }
  }
  if (own[0] != 0) {
    return refuse(ncclInvalidUsage, comm->name() + " sends to itself without a receive");
  }
  const int before = runtime.device;
  runtime.device = comm->device;  // like NCCL, whose null stream is that of its device
  const ncclResult_t result = submit(comm, calls, stream);
  runtime.device = before;
  return result;
}

ncclResult_t Nccl::submit(const CommPtr& comm, std::vector<Call> calls, cudaStream_t handle) {
  CUstream_st* stream = runtime.resolve(handle);
  if (stream == nullptr || stream->device != comm->device) {
    return refuse(ncclInvalidUsage, comm->name() + ": a stream of another device, or none");
  }
  LaunchOrder& order = *comm->order;
  std::shared_ptr<int> in_graph;
  if (stream->capture != nullptr) {
    in_graph = std::make_shared<int>();
    comm->graphs.push_back(in_graph);
    auto& tips = stream->tips;
    if (order.capture == stream->capture->id &&
        std::find(tips.begin(), tips.end(), order.node) == tips.end()) {
      tips.push_back(order.node);
    }
  }
  const auto enqueue = [this, comm, calls = std::move(calls), in_graph](int on) {
    if (comm->state == ncclComm::State::kGone) {
      (void)misuse("a graph is launched with calls of " + comm->name() + ", which is destroyed");
      return;
    }
    if (comm->order->last != nullptr) {
      runtime.wait_on(on, comm->order->last, "the call before of " + comm->clique->name);
    }
    const auto kernel = std::make_shared<Kernel>(*this, comm, calls);
    runtime.machine.enqueue_task(
        on, [kernel] { return kernel->describe(); },
        [kernel](Agent& agent) { return kernel->attempt(agent); });
    comm->order->last = runtime.signal_on(on);
  };
  const cudaError_t status = runtime.submit(handle, enqueue, Node::Kind::kKernel);
  if (status != cudaSuccess) {
    return refuse(ncclUnhandledCudaError, comm->name() + ": " + cudaGetErrorName(status));
  }
  if (stream->capture != nullptr) {
    order.capture = stream->capture->id;
    order.node = stream->capture->nodes.size() - 1;
  }
  return ncclSuccess;
}

}  // namespace axonn::gpu_machine::nccl
