#include "ops/cuda/call_fused.h"

#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "ops/checks.h"
#include "ops/cuda/exchange.h"
#include "ops/cuda/fused_matmul.h"
#include "ops/cuda/nccl_workspace.h"
#include "ops/cuda/symmetric_workspace.h"

namespace axonn::ops::cuda {
namespace {

using kernels::cuda::CallOrder;
using kernels::cuda::NcclChunks;

// Returns whether the group's ranks run under one kernel of the operating system, even if in
// different containers.
bool is_on_one_host(const c10d::ProcessGroup& group, const CallGroup& call,
                    const std::string& prefix) {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  const auto boots = exchange(group, call.name, prefix, "host", boot, call.timeout_seconds);
  return std::all_of(boots.begin(), boots.end(), [&](const auto& other) { return other == boot; });
}

void check_transport(const char* op, const CallGroup& group) {
  const bool nccl = group.transport == "nccl";
  TORCH_CHECK_VALUE(nccl || group.transport == "auto" || group.transport == "copy_engine", op,
                    ": transport must be 'auto', 'copy_engine' or 'nccl', got '", group.transport,
                    "'");
  TORCH_CHECK_VALUE(group.nccl_sms >= NcclChunks::kMostCtas || (group.nccl_sms == 0 && !nccl), op,
                    ": nccl_sms must be ", nccl ? "" : "0 or ", "at least ", NcclChunks::kMostCtas,
                    ", got ", group.nccl_sms);
  TORCH_CHECK_VALUE(group.free_sms >= 0, op, ": free_sms must be at least 0, got ", group.free_sms);
}

// A first call allocates memory and exchanges data with peers, which a graph cannot capture.
void check_may_begin(const char* op, const CallGroup& group) {
  TORCH_CHECK(!is_capturing(), op, ": the first call of group '", group.name,
              "' cannot be captured into a graph; make the call once before capturing it");
}

class Registry {
 public:
  Workspace& find(const char* op, const CallGroup& call) {
    const std::lock_guard lock(mutex_);
    const auto group = c10d::resolve_process_group(call.name);
    Entry& entry = entries_[{call.name, call.device.index()}];
    // c10d may reuse a name after its group was destroyed.
    if (entry.prefix.empty() || entry.owner.lock() != group) {
      const int64_t number = numbers_[call.name]++;  // all ranks get here equally often
      entry = {};
      entry.owner = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group);
      entry.prefix = "axonn_ext/" + call.name + "/" + std::to_string(number);
    }
    auto& order = orders_[call.device.index()];
    if (order == nullptr) order = std::make_unique<CallOrder>();
    return takes_nccl(op, call, *group, entry)
               ? over_nccl(op, call, *group, entry, *order)
               : over_symmetric_memory(op, call, *group, entry, *order);
  }

  void release() {
    const std::lock_guard lock(mutex_);
    for (auto& [key, entry] : entries_) {
      const c10::cuda::CUDAGuard guard(key.second);
      const bool is_destroyed = !is_registered(key.first, entry);
      if (entry.symmetric != nullptr) {
        if (!is_destroyed) {
          entry.symmetric->release();
        } else if (entry.symmetric->is_unused()) {
          entry.symmetric.reset();
        }
      }
      for (auto& [sms, workspace] : entry.nccl) workspace->release();
    }
  }

  int64_t symmetric_bytes() {
    const std::lock_guard lock(mutex_);
    int64_t total = 0;
    for (const auto& [key, entry] : entries_) {
      if (entry.symmetric != nullptr) total += entry.symmetric->bytes();
    }
    return total;
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> owner =
        c10::weak_intrusive_ptr<c10d::ProcessGroup>(c10::intrusive_ptr<c10d::ProcessGroup>());
    std::string prefix;  // of the keys that its ranks write into the store
    std::optional<bool> on_one_host;
    std::unique_ptr<SymmetricWorkspace> symmetric;
    std::map<int64_t, std::unique_ptr<NcclWorkspace>> nccl;  // by number of SMs left to NCCL
  };

  // c10d may have destroyed the group, or given its name to another one, while Python objects still
  // hold it.
  static bool is_registered(const std::string& name, const Entry& entry) {
    const auto owner = entry.owner.lock();
    if (owner == nullptr) return false;
    try {
      return c10d::resolve_process_group(name) == owner;
    } catch (const c10::Error&) {
      return false;
    }
  }

  static bool takes_nccl(const char* op, const CallGroup& call, const c10d::ProcessGroup& group,
                         Entry& entry) {
    if (call.transport != "auto") return call.transport == "nccl";
    if (call.nccl_sms == 0) return false;
    if (!entry.on_one_host) {
      check_may_begin(op, call);
      entry.on_one_host = is_on_one_host(group, call, entry.prefix);
    }
    return !*entry.on_one_host;
  }

  static Workspace& over_nccl(const char* op, const CallGroup& call,
                              const c10d::ProcessGroup& group, Entry& entry, CallOrder& order) {
    auto& workspace = entry.nccl[call.nccl_sms];
    if (workspace == nullptr) {
      check_may_begin(op, call);
      const auto name = entry.prefix + "/nccl" + std::to_string(call.nccl_sms);
      workspace = std::make_unique<NcclWorkspace>(group, call.name, name, call.device,
                                                  call.timeout_seconds, call.nccl_sms, order);
    }
    return *workspace;
  }

  static Workspace& over_symmetric_memory(const char* op, const CallGroup& call,
                                          const c10d::ProcessGroup& group, Entry& entry,
                                          CallOrder& order) {
    if (entry.symmetric == nullptr) {
      check_may_begin(op, call);
      entry.symmetric = std::make_unique<SymmetricWorkspace>(
          group, call.name, entry.prefix, call.device, call.timeout_seconds, order);
    }
    return *entry.symmetric;
  }

  std::mutex mutex_;
  std::map<c10::DeviceIndex, std::unique_ptr<CallOrder>> orders_;
  std::map<std::string, int64_t> numbers_;
  std::map<std::pair<std::string, c10::DeviceIndex>, Entry> entries_;
};

Registry& registry() {
  static auto* all = new Registry;  // CUDA is gone before static objects are destroyed
  return *all;
}

}  // namespace

at::Tensor call_fused(const char* op, const CallGroup& group,
                      const std::function<PreparedCall(const kernels::Residency&)>& prepare) {
  check_transport(op, group);
  const auto why = why_no_ranks(group.size);
  TORCH_CHECK_NOT_IMPLEMENTED(why.empty(), op, ": group '", group.name, "': ", why,
                              "; use 'auto', 'chunked' or 'sequential'");
  const c10::cuda::CUDAGuard guard(group.device);
  Workspace& workspace = registry().find(op, group);
  auto residency = workspace.residency();
  residency.free_sms = group.free_sms;
  const PreparedCall call = prepare(residency);
  workspace.require(op, call.workspace_bytes);
  return workspace.call(call, group.graphs_in_turn);
}

void release_workspaces() {
  TORCH_CHECK(!is_capturing(), "release_workspaces: a graph is being captured");
  registry().release();
}

int64_t symmetric_workspace_bytes() { return registry().symmetric_bytes(); }

}  // namespace axonn::ops::cuda
