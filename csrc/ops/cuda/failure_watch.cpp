#include "ops/cuda/failure_watch.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

namespace axonn::ops::cuda {
namespace {

using kernels::cuda::PinnedState;
using kernels::cuda::SpinFailure;

class FailureWatch {
 public:
  void add(std::shared_ptr<const PinnedState> state, std::string group) {
    const std::lock_guard lock(mutex_);
    states_.emplace_back(std::move(state), std::move(group));
    if (thread_.joinable()) return;
    thread_ = std::thread([this] { watch(); });
    // This is registered after CUDA's own exit handler, which frees the memory, so it runs before
    // that one.
    std::atexit([] { failure_watch().stop(); });
  }

  static FailureWatch& failure_watch() {
    static auto* watch = new FailureWatch;  // CUDA may be gone before static objects are destroyed
    return *watch;
  }

 private:
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
    }
    stopped_.notify_all();
    thread_.join();
  }

  void watch() {
    std::unique_lock lock(mutex_);
    while (!stopped_.wait_for(lock, std::chrono::milliseconds(100), [this] { return stops_; })) {
      std::erase_if(states_, [](const auto& item) { return report(*item.first, item.second); });
    }
    // A process whose context is lost often ends before the next look, so look once more.
    for (const auto& [state, group] : states_) report(*state, group);
  }

  static bool report(const PinnedState& state, const std::string& group) {
    const volatile SpinFailure& failure = state.failure();
    if (failure.state != SpinFailure::kWritten) return false;
    std::ostringstream text;
    text << "axonn_ext: a fused op of rank " << failure.rank << " in group '" << group
         << "' waited in vain for rank " << failure.peer << " (chunk " << failure.chunk << ", call "
         << failure.expected << ", which had come as far as call " << failure.seen
         << "). Its CUDA context is lost; ";
    if (failure.own_rows_stay) {
      text << "this rank's own rows have not left either, so CUDA runs the graph's branches one "
              "after the other. Start the job with CUDA_DEVICE_MAX_CONNECTIONS=1: rows then leave "
              "before the product begins.\n";
    } else {
      text << "see what happened to that rank.\n";
    }
    std::cerr << text.str() << std::flush;
    return true;
  }

  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stops_ = false;
  std::thread thread_;
  std::vector<std::pair<std::shared_ptr<const PinnedState>, std::string>> states_;
};

}  // namespace

void watch_for_failure(std::shared_ptr<const kernels::cuda::PinnedState> state, std::string group) {
  FailureWatch::failure_watch().add(std::move(state), std::move(group));
}

}  // namespace axonn::ops::cuda
