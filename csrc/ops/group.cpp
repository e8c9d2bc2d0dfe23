#include "ops/group.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/util/Logging.h>

#include <chrono>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "ops/c10d_store.h"
#include "ops/fused_cuda.h"
#include "ops/paced_links.h"

namespace axonn::ops {
namespace {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Shown with TORCH_CPP_LOG_LEVEL=INFO.
void log_growth(const comm::SymmetricGroup& group, const char* op) {
  LOG(INFO) << "axonn_ext: symmetric memory of rank " << group.rank() << " in group "
            << group.label() << " grows to " << group.used_bytes() << " bytes, for " << op;
}

// Shared memory of the process groups met so far. An entry holds as long as its process group
// lives; a name that c10d gave to another group later meets a new entry.
class SharedGroups {
 public:
  void configure(const GroupSettings& settings) {
    const std::lock_guard lock(mutex_);
    settings_ = settings;
  }

  std::shared_ptr<comm::SymmetricGroup> find_or_rendezvous(const std::string& name,
                                                           const ProcessGroupPtr& group) {
    const std::lock_guard lock(mutex_);
    if (const auto entry = entries_.find(name); entry != entries_.end()) {
      if (entry->second.owner.lock() == group) return entry->second.shared;
    }
    drop_dead_groups();
    C10dStore store(group->getStore());
    const auto& description = group->getGroupDesc();  // "undefined" if nobody gave one
    std::shared_ptr<comm::SymmetricGroup> shared = comm::SymmetricGroup::rendezvous(
        {.name = name,
         .rank = group->getRank(),
         .size = group->getSize(),
         .workspace_bytes = settings_.symmetric_memory_bytes / 2,
         .timeout = std::chrono::duration<double>(settings_.timeout_seconds),
         .label = description == "undefined" ? "" : description,
         .on_growth = &log_growth},
        store);
    entries_.insert_or_assign(name,
                              Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), shared});
    return shared;
  }

  // Whether this is the first time that someone asks so for the group of that name.
  bool ask_once(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const auto entry = entries_.find(name);
    return entry != entries_.end() && !std::exchange(entry->second.asked, true);
  }

  void add_waited_seconds(std::map<std::string, double>& totals) {
    const std::lock_guard lock(mutex_);
    for (const auto& [name, entry] : entries_) totals[name] += entry.shared->waited_seconds();
  }

  double timeout_seconds() {
    const std::lock_guard lock(mutex_);
    return settings_.timeout_seconds;
  }

  int64_t bytes_in_use() {
    const std::lock_guard lock(mutex_);
    drop_dead_groups();
    int64_t bytes = 0;
    for (const auto& [name, entry] : entries_) bytes += entry.shared->used_bytes();
    return bytes;
  }

 private:
  void drop_dead_groups() {
    std::erase_if(entries_, [](const auto& entry) { return entry.second.owner.expired(); });
  }

  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> owner;
    std::shared_ptr<comm::SymmetricGroup> shared;
    bool asked = false;
  };

  std::mutex mutex_;
  GroupSettings settings_{600.0, int64_t{32} << 30};
  std::map<std::string, Entry> entries_;
};

// Time spent in waits for c10d's collectives, by group name.
class C10dWaits {
 public:
  void add(const std::string& name, double seconds) {
    const std::lock_guard lock(mutex_);
    seconds_[name] += seconds;
  }
  std::map<std::string, double> totals() {
    const std::lock_guard lock(mutex_);
    return seconds_;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, double> seconds_;
};

C10dWaits& c10d_waits() {
  static C10dWaits waits;
  return waits;
}

// What this rank sends of a whole tensor in the algorithm that moves least; an all-reduce, twice.
int64_t bytes_sent(const Group& group, const at::Tensor& whole) {
  return static_cast<int64_t>(whole.nbytes()) * (group.size - 1) / group.size;
}

// Starts a collective that reads `input`, in which this rank sends `bytes`; returns how to wait for
// it. Behind an emulated link of the group it takes its time.
template <typename Start>
std::function<void()> issue(const Group& group, const at::Tensor& input, int64_t bytes,
                            Start&& start) {
  using Clock = std::chrono::steady_clock;
  const auto process_group = c10d::resolve_process_group(group.name);
  const auto link = input.is_cpu() ? find_link(group.name, process_group) : nullptr;
  const int64_t transfer = link == nullptr ? 0 : link->begin(bytes);
  c10::intrusive_ptr<c10d::Work> work = start(*process_group);
  return [work, input, group, link, transfer] {
    const auto began = Clock::now();
    work->wait();
    if (link != nullptr) link->end(transfer);
    c10d_waits().add(group.name, std::chrono::duration<double>(Clock::now() - began).count());
  };
}

// The dtype in which c10d adds up a tensor: wider than its own, at twice the bytes, where the link
// is a copy in memory and not what an op waits for.
at::ScalarType sum_dtype(const at::Tensor& t) {
  return t.is_cpu() && t.scalar_type() == at::kBFloat16 ? at::kFloat : t.scalar_type();
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

SharedGroups& shared_groups() {
  static SharedGroups groups;
  return groups;
}

}  // namespace

void configure_groups(const GroupSettings& settings) { shared_groups().configure(settings); }

double timeout_seconds() { return shared_groups().timeout_seconds(); }

int64_t symmetric_memory_bytes_in_use() { return shared_groups().bytes_in_use(); }

std::map<std::string, double> waited_seconds() {
  auto totals = c10d_waits().totals();
  shared_groups().add_waited_seconds(totals);
  return totals;
}

void check_algorithm(const char* op, const std::string& algorithm, c10::Device device,
                     bool fused_on_cuda) {
  TORCH_CHECK_VALUE(algorithm == "auto" || algorithm == "fused" || algorithm == "chunked" ||
                        algorithm == "sequential",
                    op, ": algorithm must be 'auto', 'fused', 'chunked' or 'sequential', got '",
                    algorithm, "'");
  if (algorithm != "fused" || device.is_cpu()) return;
  TORCH_CHECK_NOT_IMPLEMENTED(fused_on_cuda && device.is_cuda(), op,
                              ": algorithm='fused' exists on cpu only so far, got tensors on ",
                              device, "; use 'auto', 'chunked' or 'sequential'");
  TORCH_CHECK_NOT_IMPLEMENTED(has_fused_on_cuda(), op,
                              ": algorithm='fused' cannot do this: ", kNotBuilt,
                              "; use 'auto', 'chunked' or 'sequential'");
}

Group resolve_group(const char* op, const std::string& name, int64_t size,
                    const std::string& algorithm, c10::Device device) {
  if (size == 1) return {name, 0, 1, nullptr};
  const auto process_group = c10d::resolve_process_group(name);
  TORCH_CHECK_VALUE(process_group->getSize() == size, op, ": group_size=", size, " but group '",
                    name, "' has ", process_group->getSize(), " ranks");
  Group group{name, process_group->getRank(), size, nullptr};
  if (algorithm == "sequential" || algorithm == "chunked" || !device.is_cpu()) return group;
  if (is_paced(*process_group)) {
    TORCH_CHECK_VALUE(
        algorithm == "auto", op,
        ": algorithm='fused' reads peers' memory in place, which no emulated link "
        "(AXONN_EMULATED_LINKS) can slow down; use 'auto', 'chunked' or 'sequential'");
    return group;
  }
  auto shared = shared_groups().find_or_rendezvous(name, process_group);
  if (shared->on_one_host()) {
    group.shared = std::move(shared);
  } else {
    TORCH_CHECK_VALUE(algorithm == "auto", op,
                      ": algorithm='fused' needs shared memory between all ranks of group '", name,
                      "', but ", shared->obstacle(), "; use 'auto', 'chunked' or 'sequential'");
    if (group.rank == 0 && shared_groups().ask_once(name)) {
      TORCH_WARN("axonn_ext: the ranks of group '", shared->label(), "' share no memory, since ",
                 shared->obstacle(), ". So algorithm='auto' does not fuse matmuls with this ",
                 "group's collectives: it takes 'sequential' (c10d's collective, then the ",
                 "library's matmul), or what a warm-up measures to be faster");
    }
  }
  return group;
}

// torch 2.13 renames the two collectives below; 2.11 knows the old names only.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

Pending start_all_gather(const Group& group, const at::Tensor& shard) {
  const auto input = shard.contiguous();
  std::vector<int64_t> stacked = input.sizes().vec();
  stacked.insert(stacked.begin(), group.size);
  auto output = at::empty(stacked, input.options());
  if (output.numel() == 0) return {output, [] {}};
  auto out = output.view(-1), in = input.view(-1);
  // Not the coalesced form: of an operation with a name as long as ALLGATHER_COALESCED, gloo's two
  // threads write the name into one std::string unguarded (ProcessGroupGloo::runLoop), which
  // corrupts the heap where it has to be allocated. Short names live in the string itself.
  return {output, issue(group, input, bytes_sent(group, output),
                        [&](c10d::ProcessGroup& peers) { return peers._allgather_base(out, in); })};
}

Pending start_reduce_scatter(const Group& group, const at::Tensor& stacked) {
  const auto input = stacked.to(sum_dtype(stacked)).contiguous();
  auto output = at::empty(input.sizes().slice(1), input.options());
  if (output.numel() == 0) return {output, [] {}};
  std::vector<at::Tensor> outputs{output.view(-1)}, inputs{input.view(-1)};
  return {output, issue(group, input, bytes_sent(group, input), [&](c10d::ProcessGroup& peers) {
            return peers.reduce_scatter_tensor_coalesced(outputs, inputs);
          })};
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
