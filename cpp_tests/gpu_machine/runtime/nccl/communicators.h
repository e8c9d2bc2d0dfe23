// NCCL on the runtime: communicators of virtual ranks in one process or, over a wire, of ranks in
// several. nccl.h declares its functions, which are in api_nccl.cpp. Source of their behavior:
// NVIDIA, NCCL 2.30, src/init.cc, group.cc and enqueue.cc.
//
// Each rank stands for its own process: nothing that one rank does makes NCCL do anything for
// another rank, except over the "wire".
#pragma once

#include <nccl.h>

#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gpu_machine/runtime/nccl/meeting.h"
#include "gpu_machine/runtime/nccl/wire.h"
#include "gpu_machine/runtime/runtime.h"

struct ncclComm;

namespace axonn::gpu_machine::nccl {

class Nccl;
using CommPtr = std::shared_ptr<ncclComm>;

// The contents of a configuration, with NCCL's defaults.
struct Config {
  bool blocking = true;
  int min_ctas = 0, max_ctas = 0;  // 0: as NCCL chooses
  int cluster = 4;                 // CTAs that start together; NCCL's default on sm_90
  bool shares = false;             // whether communicators split off share resources
};

// Collectives that all ranks call as one group.
struct Round {
  int first = 0;  // the rank that came first
  std::vector<Call> calls;
  std::vector<MeetingPtr> meetings;
  std::set<int> ranks;  // those that have come
};

// A transfer of which one end has come, or both.
struct Transfer {
  Call call;
  int rank = 0;  // of the end that came first
  MeetingPtr meeting;
};

// The ranks of a communicator.
struct Clique {
  std::string name;
  int size = 0;
  std::shared_ptr<Wire> wire;        // null if all ranks are in this process
  std::map<int, ncclComm*> members;  // by rank; only those of this process that have joined
  // Chosen by the adversary once all have joined.
  std::vector<int> ring;
  int min_ctas = 1, max_ctas = 1, transfer_ctas = 1;
  // Whether ranks connect at their first calls, where NCCL's thread then waits for the peers.
  bool connects_late = false;
  std::set<int> connecting;                                 // ranks with a first collective
  std::map<std::pair<int, int>, std::set<int>> to_connect;  // the same for transfers, by pair

  std::map<int64_t, Round> rounds;                               // by number
  std::map<std::pair<int, int>, std::deque<Transfer>> sends;     // whose receive has not begun
  std::map<std::pair<int, int>, std::deque<Transfer>> receives;  // whose send has not begun
  std::map<int64_t, std::map<int, std::pair<int, int>>> splits;  // color and key, by split and rank
  std::map<std::pair<int64_t, int>, std::shared_ptr<Clique>> parts;  // by split and colour
};

// The order of a communicator's kernels: NCCL runs them in the order of the calls, on whatever
// streams. Communicators that share resources have one order.
struct LaunchOrder {
  SignalPtr last;        // the end of the previous kernel
  uint64_t capture = 0;  // the previous kernel's capture, and its node
  size_t node = 0;
};

// Work of a communicator that is not a kernel and ends some time later. `attempt` returns nothing
// until it can end.
struct Job {
  CommPtr comm;  // the communicator whose state is set
  int delay = 0;
  std::function<std::optional<ncclResult_t>()> attempt;
  std::function<void()> cancel = [] {};  // what NCCL does if the communicator is aborted first
  std::string waits_for = {};            // for deadlock reports
  bool always_blocks = false;            // even if the communicator does not
};

// The calls of a thread since ncclGroupStart.
struct Group {
  const Nccl* of = nullptr;
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<std::pair<CommPtr, Call>> calls;
  std::vector<Job> jobs;
};

// The state of NCCL, for one Runtime.
class Nccl {
 public:
  explicit Nccl(Runtime& of_runtime);
  static Nccl& current();

  // --- Called by api_nccl.cpp ---
  ncclResult_t unique_id(ncclUniqueId& id);
  ncclResult_t init(ncclComm_t* comm, int size, const ncclUniqueId& id, int rank,
                    const ncclConfig_t* config);
  ncclResult_t init_all(ncclComm_t* comms, int count, const int* devices);
  ncclResult_t split(ncclComm& parent, int colour, int key, ncclComm_t* made,
                     const ncclConfig_t* config);
  ncclResult_t finalize(ncclComm& comm);
  ncclResult_t destroy(ncclComm& comm);
  ncclResult_t abort(ncclComm& comm);
  ncclResult_t async_error(ncclComm& comm, ncclResult_t& state);
  ncclResult_t call(ncclComm& comm, const Call& call);
  ncclResult_t group_start();
  ncclResult_t group_end();
  // In a group, makes an error the group's as well. Returns its argument.
  ncclResult_t fail_group(ncclResult_t result);

  // Returns the communicator. If it no longer exists, ends the machine and returns null.
  CommPtr find(ncclComm_t comm, const char* function);
  // Remembers for ncclGetLastError why a call is refused.
  ncclResult_t refuse(ncclResult_t result, const std::string& why);
  ncclResult_t misuse(const std::string& what);
  const std::string& last_error() const { return last_error_; }

  Runtime& runtime;

 private:
  friend class Kernel;
  CommPtr make_comm(std::shared_ptr<Clique> clique, int rank, int device, const Config& config);
  Job joining(const CommPtr& comm, ncclComm_t* made);
  bool have_all_joined(const ncclComm& comm) const;
  std::shared_ptr<Clique> make_clique(const std::string& name);
  Job ending(const CommPtr& comm, const char* what, bool frees);
  ncclResult_t check_usable(const ncclComm& comm, const char* what);
  void choose_for(Clique& clique);
  Group& group();
  // Runs jobs and launches, at once or in the background.
  ncclResult_t carry_out(Group done);
  // Whether the ranks of these calls are connected; notes that this rank wants to be.
  bool are_connected(const ncclComm& comm, const std::vector<Call>& calls) const;
  ncclResult_t launch(const CommPtr& comm, const std::vector<Call>& calls);
  ncclResult_t submit(const CommPtr& comm, std::vector<Call> calls, cudaStream_t stream);
  bool work_in_background();
  void tell_peers_of_abort(const ncclComm& comm);

  std::vector<CommPtr> comms_;
  std::map<std::string, std::shared_ptr<Clique>> cliques_;  // by unique id
  std::list<Job> jobs_;                                     // of nonblocking communicators
  int64_t ids_ = 0;
  std::string last_error_ = "no error";
};

}  // namespace axonn::gpu_machine::nccl

// Only declared by nccl.h: the communicator of one rank.
struct ncclComm : std::enable_shared_from_this<ncclComm> {
  enum class State { kJoining, kReady, kFinalized, kGone };

  std::shared_ptr<axonn::gpu_machine::nccl::Clique> clique;
  int rank = 0, device = 0;
  axonn::gpu_machine::nccl::Config config;
  State state = State::kJoining;
  bool aborted = false;
  ncclResult_t async = ncclInProgress;
  int remote_error_in = -1;  // number of state queries until a peer's end is noticed; -1: never
  int64_t rounds = 0, splits = 0;
  std::map<std::pair<int, int>, int64_t> transfers;  // so far, by source and sink
  int kernels = 0;                                   // enqueued but not finished
  std::shared_ptr<axonn::gpu_machine::nccl::LaunchOrder> order;
  std::vector<std::weak_ptr<void>> graphs;  // those with kernels of this communicator

  bool has_graphs() const;
  std::string name() const { return clique->name + " on rank " + std::to_string(rank); }
};
