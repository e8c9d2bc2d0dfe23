#include "ops/group/meeting.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <vector>

#include "core/ranks/errors.h"

namespace axonn::ops {
namespace {

using Clock = std::chrono::steady_clock;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr int kTag = 0x61786e6e;  // a tag that no user's program is likely to send under

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
  // All sends and receives are started before any is waited for.
  const int size = group.getSize();
  std::vector<WorkPtr> sent(size), received(size);
  std::vector<at::Tensor> out{at::zeros({1}, at::kByte)};
  for (int peer = 0; peer < size; ++peer) {
    if (peer == group.getRank()) continue;
    std::vector<at::Tensor> in{at::zeros({1}, at::kByte)};
    settle(peer, [&] {
      received[peer] = connected->recv(in, peer, kTag);
      sent[peer] = connected->send(out, peer, kTag);
    });
  }
  for (auto* works : {&received, &sent}) {
    for (int peer = 0; peer < size; ++peer) {
      const auto& work = (*works)[peer];
      if (work == nullptr) continue;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
      settle(peer, [&] { work->wait(std::max(left, std::chrono::milliseconds(1))); });
    }
  }
}

}  // namespace axonn::ops
