#include "ops/composed/c10d_collectives.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "core/ranks/errors.h"
#include "core/ranks/waits.h"
#include "ops/checks.h"
#include "ops/emulation/emulated_links.h"
#include "ops/group/agreement.h"

namespace axonn::ops {
namespace {

using Clock = std::chrono::steady_clock;

// Returns the bytes that this rank sends to gather or reduce-scatter a whole tensor, with the
// algorithm that moves the least; an all-reduce sends twice as many.
int64_t bytes_sent(const Group& group, const at::Tensor& whole) {
  return static_cast<int64_t>(whole.nbytes()) * (group.size - 1) / group.size;
}

// A c10d collective on CPU tensors; the host waits for it.
class HostWait {
 public:
  HostWait(const Group& group, c10::intrusive_ptr<c10d::Work> work)
      : work_(std::move(work)), group_(group) {
    if (group.agreement == nullptr) return;
    call_ = group.agreement->signature();
    number_ = group.agreement->call_number();
    group_.agreement = nullptr;  // it may end before this object
  }

  // Throws CommunicationError if the collective fails, if a peer has failed, or after
  // AXONN_TIMEOUT_SECONDS.
  void wait() const {
    const auto start = Clock::now();
    const double timeout = timeout_seconds();
    std::optional<comm::NotedWait> noted;
    while (!done_within(std::min(kSlice, timeout - seconds_since(start)))) {
      if (!noted) noted.emplace(noted_since(start));
      // Gloo notices a peer that has ended, but not one that has failed and still runs.
      if (group_.shared != nullptr && group_.shared->has_failed_peer())
        fail("in vain: " + group_.shared->lost_peer());
      if (seconds_since(start) < timeout) continue;
      fail("that is not done " + comm::after_timeout(timeout));
    }
  }

 private:
  static constexpr double kSlice = 0.25;

  comm::Wait noted_since(Clock::time_point start) const {
    return {.group = group_.name,
            .axis = group_.label(),
            .call = call_.describe(),
            .number = number_,
            .peers = comm::all_but(group_.rank, group_.size),
            .what = "may not have done its part of a collective of c10d",
            .since = start};
  }

  static double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  // Returns whether the collective is done. An exception does not decide that, because c10d reports
  // a timeout with the same type of error as any other failure.
  bool done_within(double seconds) const {
    const auto slice = std::chrono::milliseconds(std::max<int64_t>(1, std::llround(1e3 * seconds)));
    try {
      work_->wait(slice);
      return true;
    } catch (const std::exception&) {
      if (!work_->isCompleted()) return false;
    }
    try {
      work_->wait();
    } catch (const std::exception& error) {
      const std::string text = error.what();
      fail("that c10d gave up" + name_lost() + ": " + text.substr(0, text.find('\n')));
    }
    return true;
  }

  // Gloo knows peers only by address, and notices that a process has ended a little before the
  // group does. So this gives the group up to 0.3 s to name the peer.
  std::string name_lost() const {
    for (int look = 0; group_.shared != nullptr && look < 30; ++look) {
      if (const auto lost = group_.shared->lost_peer(); !lost.empty()) return " because of " + lost;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return "";
  }

  [[noreturn]] void fail(const std::string& why) const {
    throw comm::CommunicationError(call_.op() + ": rank " + std::to_string(group_.rank) +
                                   " waited for a collective of group " + group_.label() + " " +
                                   why);
  }

  c10::intrusive_ptr<c10d::Work> work_;
  Group group_;
  comm::CallSignature call_ = comm::CallSignature::of("collective");
  int64_t number_ = 0;  // number of the call in the group; 0: none
};

// Once all ranks agree on the call, starts a collective that reads `input` and makes this rank send
// `bytes`. Returns a function that waits for it. If the group has an emulated link, the wait lasts
// as long as the link takes.
template <typename Start>
std::function<void()> issue(const Group& group, const at::Tensor& input, int64_t bytes,
                            Start&& start) {
  if (group.agreement != nullptr) group.agreement->reach();
  const auto process_group = c10d::resolve_process_group(group.name);
  const auto link = input.is_cpu() ? find_link(group.name, process_group) : nullptr;
  const int64_t transfer = link == nullptr ? 0 : link->begin(bytes);
  c10::intrusive_ptr<c10d::Work> work = start(*process_group);
  if (!input.is_cpu()) return [work, input] { work->wait(); };
  return [host = HostWait(group, work), name = group.name, input, link, transfer] {
    const auto began = Clock::now();
    host.wait();
    if (link != nullptr) link->end(transfer);
    add_c10d_wait(name, std::chrono::duration<double>(Clock::now() - began).count());
  };
}

// The dtype in which c10d sums a tensor. Only on the CPU is it wider than the tensor's own, at
// twice the bytes: there the link is a copy in memory, and an op does not wait for that.
at::ScalarType sum_dtype(const at::Tensor& t) {
  return t.is_cpu() && is_16_bit_float(t.scalar_type()) ? at::kFloat : t.scalar_type();
}

Pending all_reduce_in_place(const Group& group, const at::Tensor& output,
                            c10d::ReduceOp::RedOpType op) {
  if (output.numel() == 0) return {output, [] {}};
  std::vector<at::Tensor> tensors{output.view(-1)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return {output,
          issue(group, output, 2 * bytes_sent(group, output),
                [&](c10d::ProcessGroup& peers) { return peers.allreduce(tensors, options); })};
}

}  // namespace

// torch 2.13 renames the two collectives below; 2.11 has only the old names.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

Pending start_all_gather(const Group& group, const at::Tensor& shard) {
  const auto input = shard.contiguous();
  std::vector<int64_t> stacked = input.sizes().vec();
  stacked.insert(stacked.begin(), group.size);
  auto output = at::empty(stacked, input.options());
  if (output.numel() == 0) return {output, [] {}};
  auto out = output.view(-1), in = input.view(-1);
  // Not the coalesced form: gloo's two threads write the name of an operation into one std::string
  // without a lock (ProcessGroupGloo::runLoop). For a name as long as ALLGATHER_COALESCED the
  // string allocates, and the heap is corrupted. Short names are stored in the string object
  // itself.
  return {output, issue(group, input, bytes_sent(group, output),
                        [&](c10d::ProcessGroup& peers) { return peers._allgather_base(out, in); })};
}

Pending start_reduce_scatter(const Group& group, const at::Tensor& stacked) {
  const bool on_cpu = stacked.is_cpu();
  const auto type = sum_dtype(stacked);
  // Gloo sums in place, so it needs a copy.
  const auto input = on_cpu
                         ? at::empty(stacked.sizes(), stacked.options().dtype(type)).copy_(stacked)
                         : stacked.contiguous();
  auto output = at::empty(input.sizes().slice(1), input.options());
  if (output.numel() == 0) return {output, [] {}};
  std::vector<at::Tensor> outputs{output.view(-1)}, inputs{input.view(-1)};
  const auto bytes = bytes_sent(group, input);
  if (!on_cpu) {
    return {output, issue(group, input, bytes, [&](c10d::ProcessGroup& peers) {
              return peers.reduce_scatter_tensor_coalesced(outputs, inputs);
            })};
  }
  // Gloo's own reduce-scatter is an all-reduce, too, but its wait cannot have a time limit.
  const auto wait = issue(group, input, bytes, [&](c10d::ProcessGroup& peers) {
    RECORD_FUNCTION("axonn::gloo_reduce_scatter", {});  // the name that profiles show
    return peers.allreduce(inputs);
  });
  return {output, [wait, input, output, rank = group.rank] {
            wait();
            output.copy_(input[rank]);
          }};
}

#pragma GCC diagnostic pop

at::Tensor joined(const at::Tensor& stacked, int64_t dim) {
  return dim == 0 ? stacked.flatten(0, 1) : at::cat(stacked.unbind(0), dim);
}

at::Tensor stacked(const at::Tensor& whole, int64_t dim, int64_t num_blocks) {
  return dim == 0 ? whole.unflatten(0, {num_blocks, whole.size(0) / num_blocks})
                  : at::stack(whole.chunk(num_blocks, dim), 0);
}

at::Tensor c10d_all_gather(const Group& group, const at::Tensor& shard, int64_t dim) {
  const auto gathered = start_all_gather(group, shard);
  gathered.wait();
  return joined(gathered.output, dim);
}

at::Tensor c10d_reduce_scatter(const Group& group, const at::Tensor& input, int64_t dim) {
  const auto sum = start_reduce_scatter(group, stacked(input, dim, group.size));
  sum.wait();
  return sum.output.to(input.scalar_type());
}

Pending start_all_reduce(const Group& group, const at::Tensor& input) {
  auto output = input.to(sum_dtype(input)).contiguous();
  return all_reduce_in_place(group, output, c10d::ReduceOp::SUM);
}

at::Tensor c10d_all_reduce(const Group& group, const at::Tensor& input, bool maximum) {
  const auto copy = input.to(sum_dtype(input), /*non_blocking=*/false, /*copy=*/true).contiguous();
  const auto sum =
      all_reduce_in_place(group, copy, maximum ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM);
  sum.wait();
  return sum.output.to(input.scalar_type());
}

}  // namespace axonn::ops
