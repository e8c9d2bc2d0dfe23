// Graphs: capture, instantiation and replay.
#include <cuda_runtime_api.h>

#include "gpu_machine/runtime/api.h"

using axonn::gpu_machine::Branches;
using axonn::gpu_machine::Capture;
using axonn::gpu_machine::CapturePtr;
using axonn::gpu_machine::check_order;
using axonn::gpu_machine::Node;
using axonn::gpu_machine::random_order;
using axonn::gpu_machine::Runtime;
using axonn::gpu_machine::SignalPtr;

namespace {

// Returns whether the origin's last nodes come after all work of the capture's streams.
bool is_joined(const Runtime& runtime, const Capture& capture) {
  std::vector<bool> before(capture.nodes.size(), false);
  for (const size_t tip : capture.origin->tips) before[tip] = true;
  for (size_t i = capture.nodes.size(); i-- > 0;) {
    if (!before[i]) continue;
    for (const size_t other : capture.nodes[i].after) before[other] = true;
  }
  for (const CUstream_st* stream : runtime.streams) {
    if (stream->capture.get() != &capture) continue;
    for (const size_t tip : stream->tips) {
      if (!before[tip]) return false;
    }
  }
  return true;
}

cudaError_t end_capture(Runtime& runtime, cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  if (stream == nullptr || stream->capture == nullptr) return cudaErrorIllegalState;
  const CapturePtr capture = stream->capture;
  if (capture->origin != stream) return cudaErrorStreamCaptureUnmatched;
  const bool joined = is_joined(runtime, *capture);
  for (CUstream_st* other : runtime.streams) {
    if (other->capture == capture) {
      other->capture = nullptr;
      other->tips.clear();
    }
  }
  capture->is_active = false;
  runtime.captures.erase(capture);
  std::vector<Node> nodes = std::exchange(capture->nodes, {});  // events still refer to the capture
  if (capture->is_broken) return cudaErrorStreamCaptureInvalidated;
  if (!joined) return cudaErrorStreamCaptureUnjoined;
  capture->graph->nodes = std::move(nodes);
  *graph = capture->graph.release();
  return cudaSuccess;
}

// Returns the order in which a replay enqueues nodes. If the branches run one after the other, they
// also run in this order.
std::vector<size_t> order_of(Runtime& runtime, const std::vector<Node>& nodes) {
  const auto& options = runtime.options;
  if (options.branches == Branches::kSideBySide || options.node_order == nullptr) {
    return random_order(nodes, [&](uint32_t below) { return runtime.machine.draw(below); });
  }
  std::vector<size_t> order = options.node_order(nodes);
  check_order(order, nodes);
  return order;
}

// External waits see what was recorded before the launch. After the launch, others see what it
// records: for each event, its last record.
void enqueue_nodes(Runtime& runtime, CUgraphExec_st& exec, const SignalPtr& begun,
                   const std::vector<size_t>& order, std::vector<SignalPtr>& done) {
  std::map<cudaEvent_t, SignalPtr> before;
  for (const Node& node : exec.nodes) {
    if (node.kind == Node::Kind::kWait) before[node.event] = node.event->last;
  }
  for (const size_t i : order) {
    const Node& node = exec.nodes[i];
    const int on = exec.streams[i];
    runtime.wait_on(on, begun, "the beginning of a graph");
    for (const size_t other : node.after) runtime.wait_on(on, done[other], "a node of a graph");
    if (node.enqueue != nullptr) node.enqueue(on);
    if (node.kind == Node::Kind::kWait && before[node.event] != nullptr) {
      runtime.wait_on(on, before[node.event], "an event outside of the graph");
    }
    done[i] = runtime.signal_on(on);
  }
  for (size_t i = 0; i < exec.nodes.size(); ++i) {
    if (exec.nodes[i].kind == Node::Kind::kRecord) exec.nodes[i].event->last = done[i];
  }
}

cudaError_t replay(Runtime& runtime, CUgraphExec_st& exec, int on) {
  const std::vector<size_t> order = order_of(runtime, exec.nodes);
  if (exec.replayed != nullptr) runtime.wait_on(on, exec.replayed, "the replay before");
  const SignalPtr begun = runtime.signal_on(on);
  if (exec.streams.empty()) {
    exec.streams.resize(exec.nodes.size());
    std::map<int, int> shared;  // by device
    for (size_t i = 0; i < exec.nodes.size(); ++i) {
      const int device = exec.nodes[i].device;
      const bool apart = runtime.options.branches == Branches::kSideBySide;
      if (apart || !shared.contains(device)) shared[device] = runtime.machine.new_stream(device);
      exec.streams[i] = shared[device];
    }
  }
  std::vector<SignalPtr> done(exec.nodes.size());
  enqueue_nodes(runtime, exec, begun, order, done);
  for (const SignalPtr& signal : done) runtime.wait_on(on, signal, "a graph");
  exec.replayed = runtime.signal_on(on);
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return api("cudaStreamBeginCapture", [&](Runtime& r) {
    if (r.resolve(stream) == nullptr) return cudaErrorInvalidResourceHandle;
    if (r.resolve(stream)->is_default) return cudaErrorStreamCaptureUnsupported;
    if (stream->capture != nullptr) return cudaErrorIllegalState;
    stream->capture = std::make_shared<Capture>();
    stream->capture->id = r.next_capture++;
    stream->capture->origin = stream;
    stream->capture->mode = mode;
    stream->capture->thread = std::this_thread::get_id();
    stream->capture->graph = std::make_unique<CUgraph_st>();
    r.captures.insert(stream->capture);
    return cudaSuccess;
  });
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return api("cudaStreamEndCapture", [&](Runtime& r) { return end_capture(r, stream, graph); });
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return api("cudaThreadExchangeStreamCaptureMode", [&](Runtime& r) {
    std::swap(r.capture_mode, *mode);
    return cudaSuccess;
  });
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return api("cudaStreamIsCapturing", [&](Runtime& r) {
    const CUstream_st* found = r.resolve(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    *status = found->capture == nullptr   ? cudaStreamCaptureStatusNone
              : found->capture->is_broken ? cudaStreamCaptureStatusInvalidated
                                          : cudaStreamCaptureStatusActive;
    return cudaSuccess;
  });
}
// The name is a macro in CUDA's header; its parameters differ before CUDA 13.
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
#if CUDART_VERSION >= 13000
                                     const cudaGraphEdgeData**,
#endif
                                     size_t* num_dependencies) {
  return api("cudaStreamGetCaptureInfo", [&](Runtime& r) {
    const CUstream_st* found = r.resolve(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    if (graph != nullptr && found->capture != nullptr) *graph = found->capture->graph.get();
    *status = found->capture == nullptr   ? cudaStreamCaptureStatusNone
              : found->capture->is_broken ? cudaStreamCaptureStatusInvalidated
                                          : cudaStreamCaptureStatusActive;
    if (id != nullptr && found->capture != nullptr) *id = found->capture->id;
    // A node's handle is its index plus one. The array is valid until the thread's next query;
    // CUDA's is valid until the stream gets more work.
    thread_local std::vector<cudaGraphNode_t> tips;
    tips.clear();
    for (const size_t tip : found->tips) tips.push_back(reinterpret_cast<cudaGraphNode_t>(tip + 1));
    if (dependencies != nullptr) *dependencies = tips.data();
    if (num_dependencies != nullptr) *num_dependencies = tips.size();
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  return api("cudaGraphInstantiate", [&](Runtime&) {
    *exec = new CUgraphExec_st{graph->nodes, {}, nullptr};
    return cudaSuccess;
  });
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(exec, graph, flags);
}
// Returns only the number of nodes.
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  return api("cudaGraphGetNodes", [&](Runtime&) {
    if (nodes != nullptr) return cudaErrorNotSupported;
    *count = graph->nodes.size();
    return cudaSuccess;
  });
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  return api("cudaGraphLaunch", [&](Runtime& r) {
    const CUstream_st* found = r.resolve(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    if (found->capture != nullptr) return cudaErrorNotSupported;  // a graph within a graph
    return r.submit(stream, [&](int on) { (void)replay(r, *exec, on); });
  });
}
// Replays that are already enqueued still run.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  return api("cudaGraphExecDestroy", [&](Runtime&) {
    delete exec;
    return cudaSuccess;
  });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return api("cudaGraphDestroy", [&](Runtime&) {
    delete graph;
    return cudaSuccess;
  });
}

}  // extern "C"
