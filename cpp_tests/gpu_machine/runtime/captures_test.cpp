// What CUDA promises about captures and the order of replays.
#include "gpu_machine/runtime/runtime_case.h"

namespace axonn::gpu_machine {
namespace {

using testing::device_words;
using testing::failures;
using testing::fill;
using testing::first_word;
using testing::kBytes;
using testing::kSeeds;
using testing::new_event;
using testing::stream_with;

cudaGraphExec_t instantiated(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  AXONN_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec = nullptr;
  AXONN_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  return exec;
}

// Captures two branches that fill the same words.
cudaGraphExec_t two_branches(cudaStream_t a, cudaStream_t b, uint32_t* words, bool ordered) {
  cudaEvent_t forked = new_event(), joined = new_event();
  AXONN_CUDA_CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
  AXONN_CUDA_CHECK(cudaEventRecord(forked, a));
  AXONN_CUDA_CHECK(cudaStreamWaitEvent(b, forked, 0));
  fill(words, 1, b);
  if (!ordered) fill(words, 2, a);
  AXONN_CUDA_CHECK(cudaEventRecord(joined, b));
  AXONN_CUDA_CHECK(cudaStreamWaitEvent(a, joined, 0));
  if (ordered) fill(words, 2, a);
  return instantiated(a);
}

TEST(RuntimeGraphs, BranchesAreOrderedOnlyByEvents) {
  for (const bool ordered : {false, true}) {
    const uint64_t races = failures(MachineError::Kind::kRace, [&](Runtime&) {
      cudaStream_t a = stream_with(cudaStreamNonBlocking), b = stream_with(cudaStreamNonBlocking);
      uint32_t* words = device_words();
      const cudaGraphExec_t graph = two_branches(a, b, words, ordered);
      for (int replay = 0; replay < 3; ++replay) (void)cudaGraphLaunch(graph, b);
      if (ordered) {
        AXONN_CUDA_CHECK(cudaStreamSynchronize(b));
        EXPECT_EQ(first_word(words), 0x02020202u);
      }
    });
    EXPECT_EQ(races, ordered ? 0 : kSeeds);
  }
}

// A replay waits for the last record of an external event before the launch, and records the event
// for those that wait after the launch.
TEST(RuntimeGraphs, ExternalEventsOrderReplaysWithStreams) {
  for (const bool waits : {false, true}) {
    for (const bool records : {false, true}) {
      const uint64_t races = failures(MachineError::Kind::kRace, [&](Runtime&) {
        cudaStream_t a = stream_with(cudaStreamNonBlocking), b = stream_with(cudaStreamNonBlocking);
        uint32_t* words = device_words();
        cudaEvent_t event = new_event();
        AXONN_CUDA_CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
        if (waits) AXONN_CUDA_CHECK(cudaStreamWaitEvent(a, event, cudaEventWaitExternal));
        fill(words, 1, a);
        if (records) AXONN_CUDA_CHECK(cudaEventRecordWithFlags(event, a, cudaEventRecordExternal));
        const cudaGraphExec_t graph = instantiated(a);
        for (int i = 0; i < 2; ++i) {
          (void)cudaStreamWaitEvent(b, event, 0);
          (void)cudaMemsetAsync(words, 2, kBytes, b);
          (void)cudaEventRecord(event, b);
          (void)cudaGraphLaunch(graph, a);
        }
      });
      EXPECT_EQ(races, waits && records ? 0 : kSeeds) << waits << records;
    }
  }
}

TEST(RuntimeGraphs, WhatACaptureForbidsBreaksIt) {
  cudaGraph_t graph = nullptr;
  Runtime runtime;
  cudaStream_t a = stream_with(cudaStreamNonBlocking), b = stream_with(cudaStreamNonBlocking);
  cudaEvent_t event = new_event();
  uint32_t* words = device_words();
  const auto begin = [&] {
    AXONN_CUDA_CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
  };
  begin();  // waiting for a captured stream
  EXPECT_EQ(cudaStreamSynchronize(a), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
  AXONN_CUDA_CHECK(cudaEventRecord(event, b));
  begin();  // waiting for work outside the capture
  EXPECT_EQ(cudaStreamWaitEvent(a, event, 0), cudaErrorStreamCaptureIsolation);
  EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
  begin();  // leaving a branch open
  AXONN_CUDA_CHECK(cudaEventRecord(event, a));
  AXONN_CUDA_CHECK(cudaStreamWaitEvent(b, event, 0));
  fill(words, 1, b);
  EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(graph, nullptr);
  EXPECT_EQ(cudaStreamWaitEvent(b, event, 0), cudaErrorCapturedEvent);
}

}  // namespace
}  // namespace axonn::gpu_machine
