#include "ops/group/meeting.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "core/ranks/errors.h"

namespace axonn::ops {
namespace {

using Clock = std::chrono::steady_clock;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr int kTag = 0x61786e6e;  // a tag that user programs are unlikely to use

// One byte to each peer, and one byte from it.
struct Transfers {
  std::vector<WorkPtr> sent, received;
  std::atomic<int> peer = 0;  // whose transfers are being started
};

// Starts all transfers before any is waited for. That takes no time between ranks that are
// connected. If gloo connects them only at their first transfer (TORCH_GLOO_LAZY_INIT), it waits
// for the peer, for five times the limit of the group. So this runs in a separate thread, which is
// abandoned if the peer does not come.
std::future<void> start(const BackendPtr& connected, const std::shared_ptr<Transfers>& transfers) {
  std::packaged_task<void()> task([connected, transfers] {
    std::vector<at::Tensor> out{at::zeros({1}, at::kByte)};
    const int size = connected->getSize();
    transfers->sent.resize(size);
    transfers->received.resize(size);
    for (int peer = 0; peer < size; ++peer) {
      if (peer == connected->getRank()) continue;
      transfers->peer = peer;
      std::vector<at::Tensor> in{at::zeros({1}, at::kByte)};
      transfers->received[peer] = connected->recv(in, peer, kTag);
      transfers->sent[peer] = connected->send(out, peer, kTag);
    }
  });
  auto started = task.get_future();
  std::thread(std::move(task)).detach();
  return started;
}

}  // namespace

std::string cpu_backend(c10d::ProcessGroup& group) {
  for (const auto& device : group.getDeviceTypes()) {
    if (device.is_cpu()) return group.getBackend(c10::DeviceType::CPU)->getBackendName();
  }
  return "";
}

void meet(const char* op, c10d::ProcessGroup& group, const std::string& label,
          double timeout_seconds) {
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(timeout_seconds));
  const auto connected = group.getBackend(c10::DeviceType::CPU);
  // Completes `work` with `peer`, or records why it cannot.
  const auto settle = [&](int peer, auto&& work) {
    try {
      work();
    } catch (const std::exception& error) {
      std::ostringstream what;
      what << comm::waited_for(op, group.getRank(), peer, label);
      const std::string text = error.what();
      if (Clock::now() < end) {
        what << "has died or left the group, or whose connection an earlier failed collective "
                "closed ("
             << text.substr(0, text.find('\n')) << ")";
      } else {
        what << "has not come " << comm::after_timeout(timeout_seconds);
      }
      throw comm::CommunicationError(what.str());
    }
  };
  const auto transfers = std::make_shared<Transfers>();
  auto started = start(connected, transfers);
  const bool in_time = started.wait_until(end) == std::future_status::ready;
  settle(transfers->peer, [&] {
    if (!in_time) throw std::runtime_error("not connected");
    started.get();
  });
  for (const auto* works : {&transfers->received, &transfers->sent}) {
    for (int peer = 0; peer < group.getSize(); ++peer) {
      const auto& work = (*works)[peer];
      if (work == nullptr) continue;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
      settle(peer, [&] { work->wait(std::max(left, std::chrono::milliseconds(1))); });
    }
  }
}

}  // namespace axonn::ops
