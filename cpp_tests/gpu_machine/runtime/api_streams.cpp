// Streams and events.
#include "gpu_machine/runtime/api.h"

using axonn::gpu_machine::Node;
using axonn::gpu_machine::Runtime;
using axonn::gpu_machine::SignalPtr;

namespace {

constexpr int kHighestPriority = -5;  // as on an H100

cudaError_t create_stream(Runtime& runtime, cudaStream_t* stream, unsigned flags, int priority) {
  auto* made = new CUstream_st;
  made->device = runtime.device;
  made->stream = runtime.machine.new_stream(runtime.device);
  made->flags = flags;
  made->priority = priority;
  runtime.streams.push_back(made);
  *stream = made;
  return cudaSuccess;
}

cudaError_t record(Runtime& runtime, cudaEvent_t event, cudaStream_t handle, bool is_external) {
  CUstream_st* stream = runtime.resolve(handle);
  if (event == nullptr || stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (stream->device != event->device) return cudaErrorInvalidResourceHandle;
  if (stream->capture == nullptr) {
    if (is_external) return cudaErrorIllegalState;
    event->capture = nullptr;
    return runtime.submit(handle,
                          [&runtime, event](int on) { event->last = runtime.signal_on(on); });
  }
  if (stream->capture->is_broken) return cudaErrorStreamCaptureInvalidated;
  if (!is_external) {
    event->capture = stream->capture;
    event->tips = stream->tips;
    return cudaSuccess;
  }
  auto& nodes = stream->capture->nodes;
  nodes.push_back({Node::Kind::kRecord, stream->device, stream->tips, nullptr, event});
  stream->tips = {nodes.size() - 1};
  return cudaSuccess;
}

cudaError_t wait_captured(CUstream_st& stream, const CUevent_st& event) {
  if (!event.capture->is_active) return cudaErrorCapturedEvent;
  if (stream.capture == nullptr) {
    stream.capture = event.capture;  // the stream joins the capture
    stream.tips = event.tips;
    return cudaSuccess;
  }
  if (stream.capture != event.capture) {
    stream.capture->is_broken = event.capture->is_broken = true;
    return cudaErrorStreamCaptureMerge;
  }
  for (const size_t tip : event.tips) {
    if (std::find(stream.tips.begin(), stream.tips.end(), tip) == stream.tips.end()) {
      stream.tips.push_back(tip);
    }
  }
  return cudaSuccess;
}

cudaError_t wait(Runtime& runtime, cudaStream_t handle, cudaEvent_t event, bool is_external) {
  CUstream_st* stream = runtime.resolve(handle);
  if (event == nullptr || stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (stream->capture != nullptr && stream->capture->is_broken) {
    return cudaErrorStreamCaptureInvalidated;
  }
  if (is_external) {
    if (stream->capture == nullptr) return cudaErrorIllegalState;
    auto& nodes = stream->capture->nodes;
    nodes.push_back({Node::Kind::kWait, stream->device, stream->tips, nullptr, event});
    stream->tips = {nodes.size() - 1};
    return cudaSuccess;
  }
  if (event->capture != nullptr) return wait_captured(*stream, *event);
  if (stream->capture != nullptr) {
    stream->capture->is_broken = true;
    return cudaErrorStreamCaptureIsolation;
  }
  if (event->last == nullptr) return cudaSuccess;  // never recorded
  return runtime.submit(handle, [&runtime, signal = event->last](int on) {
    runtime.wait_on(on, signal, "an event");
  });
}

}  // namespace

extern "C" {

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return api("cudaStreamCreate", [&](Runtime& r) { return create_stream(r, stream, 0, 0); });
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return api("cudaStreamCreateWithFlags",
             [&](Runtime& r) { return create_stream(r, stream, flags, 0); });
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return api("cudaStreamCreateWithPriority", [&](Runtime& r) {
    return create_stream(r, stream, flags, std::clamp(priority, kHighestPriority, 0));
  });
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return api("cudaDeviceGetStreamPriorityRange", [&](Runtime&) {
    *least = 0;
    *greatest = kHighestPriority;
    return cudaSuccess;
  });
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return api("cudaStreamGetPriority", [&](Runtime& r) {
    const CUstream_st* found = r.resolve(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    *priority = found->priority;
    return cudaSuccess;
  });
}

// Work that is already enqueued still runs, as on a GPU.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return api("cudaStreamDestroy", [&](Runtime& r) {
    if (std::erase(r.streams, stream) == 0) return cudaErrorInvalidResourceHandle;
    if (stream->capture != nullptr) stream->capture->is_broken = true;
    r.keep_waiting_for(*stream);
    delete stream;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return api("cudaStreamSynchronize", [&](Runtime& r) { return r.wait_for_stream(stream); });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return api("cudaStreamQuery", [&](Runtime& r) {
    CUstream_st* found = r.resolve(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = r.refuse_in_capture(found)) return error;
    if (!r.machine.is_idle(found->stream)) return cudaErrorNotReady;
    r.machine.host_clock().join(r.machine.clock_of(found->stream));
    return cudaSuccess;
  });
}

// The function runs when the machine does; as on a GPU, it must not call CUDA.
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return api("cudaLaunchHostFunc", [&](Runtime& r) {
    return r.submit(stream, [&machine = r.machine, function, data](int on) {
      machine.enqueue_task(on, "calls the host", [function, data](axonn::gpu_machine::Agent&) {
        function(data);
        return true;
      });
    });
  });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return api("cudaEventCreateWithFlags", [&](Runtime& r) {
    *event = new CUevent_st;
    (*event)->flags = flags;
    (*event)->device = r.device;
    return cudaSuccess;
  });
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return api("cudaEventDestroy", [&](Runtime&) {
    delete event;
    return cudaSuccess;
  });
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return api("cudaEventRecord", [&](Runtime& r) { return record(r, event, stream, false); });
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return api("cudaEventRecordWithFlags", [&](Runtime& r) {
    return record(r, event, stream, flags == cudaEventRecordExternal);
  });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return api("cudaStreamWaitEvent",
             [&](Runtime& r) { return wait(r, stream, event, flags == cudaEventWaitExternal); });
}
// In the machine's virtual time. Only warp instructions and sleeps take time; copies take
// none.
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return api("cudaEventElapsedTime", [&](Runtime&) {
    for (const cudaEvent_t event : {start, end}) {
      if (event == nullptr || event->last == nullptr || event->capture != nullptr ||
          (event->flags & cudaEventDisableTiming) != 0) {
        return cudaErrorInvalidResourceHandle;
      }
    }
    if (start->device != end->device) return cudaErrorInvalidResourceHandle;
    if (!start->last->is_done || !end->last->is_done) return cudaErrorNotReady;
    const auto begin_ns = static_cast<double>(start->last->at_ns);
    *milliseconds = static_cast<float>((static_cast<double>(end->last->at_ns) - begin_ns) * 1e-6);
    return cudaSuccess;
  });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return api("cudaEventSynchronize", [&](Runtime& r) {
    if (event->capture != nullptr) return cudaErrorCapturedEvent;
    if (const cudaError_t error = r.refuse_in_global_capture()) return error;
    const SignalPtr last = event->last;  // another thread may record or destroy the event meanwhile
    return last == nullptr ? cudaSuccess : r.wait_for_signal(*last);
  });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return api("cudaEventQuery", [&](Runtime& r) {
    if (event->capture != nullptr) return cudaErrorCapturedEvent;
    if (const cudaError_t error = r.refuse_in_global_capture()) return error;
    if (event->last == nullptr) return cudaSuccess;
    if (!event->last->is_done) return cudaErrorNotReady;
    r.machine.host_clock().join(event->last->clock);
    return cudaSuccess;
  });
}

}  // extern "C"
