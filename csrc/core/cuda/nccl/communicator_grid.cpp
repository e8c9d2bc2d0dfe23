#include <algorithm>
#include <utility>

#include "core/cuda/nccl/communicator.h"
#include "core/cuda/nccl/nccl.h"
#include "core/cuda/nccl/nccl_connect.h"

namespace axonn::comm {
namespace {

// Colours must distinguish the groups of one split; a rank is in exactly one of them.
int colour_of(const AxisRanks& axis) { return static_cast<int>(axis.ranks.front()); }

int key_of(const AxisRanks& axis, int64_t rank) {
  const auto found = std::find(axis.ranks.begin(), axis.ranks.end(), rank);
  if (found == axis.ranks.end()) {
    throw std::invalid_argument("axis " + axis.name + " has " + name_ranks(axis.ranks) +
                                ", but this is rank " + std::to_string(rank));
  }
  return static_cast<int>(found - axis.ranks.begin());
}

}  // namespace

CommunicatorGrid::CommunicatorGrid(CommunicatorOptions options, int64_t rank, int64_t world_size,
                                   const std::vector<AxisRanks>& axes, const std::string& prefix,
                                   std::shared_ptr<KeyValueStore> store,
                                   std::shared_ptr<KeyValueStore> watch_store)
    : options_(options),
      rank_(rank),
      prefix_(prefix),
      store_(std::move(store)),
      watch_store_(std::move(watch_store)) {
  for (const auto& axis : axes) (void)key_of(axis, rank);  // throws before any collective
  const cuda::DeviceGuard guard(options_.device);
  try {
    parent_ = connect(rank, world_size, prefix);
    for (const auto& axis : axes) communicators_.push_back(split(axis));
  } catch (...) {
    abort_all();
    throw;
  }
  watch_ = std::make_unique<Watchdog>(
      WatchdogOptions{.prefix = prefix,
                      .rank = rank,
                      .timeout = options_.timeout,
                      .store_interval = interval_for(world_size)},
      *watch_store_, [this] { check_health(); }, [this] { abort_all(); });
  for (const auto& one : communicators_) {
    watch_->watch(one->watched_);
  }
}

CommunicatorGrid::~CommunicatorGrid() {
  if (!process_.is_this()) {  // the thread and the connections belong to the parent
    (void)watch_.release();
    for (auto& one : communicators_) (void)one.release();
    return;
  }
  watch_.reset();  // joins the thread, so nothing else uses the communicators
  abort_all();
}

Communicator& CommunicatorGrid::axis(const std::string& name) {
  for (const auto& one : communicators_) {
    if (one->axis() == name) return *one;
  }
  throw std::invalid_argument("axis " + name + " has no communicator: it has one rank, or none");
}

void CommunicatorGrid::close() {
  if (!process_.is_this()) process_.refuse("close", rank_, "of all axes");
  check();
  const cuda::DeviceGuard guard(options_.device);
  for (const auto& one : communicators_) one->close();
  const std::lock_guard lock(parent_mutex_);
  if (parent_ != nullptr) {
    settle(ncclCommFinalize(parent_), parent_, "ncclCommFinalize");
    AXONN_NCCL_CHECK(ncclCommDestroy(std::exchange(parent_, nullptr)));
  }
}

ncclComm_t CommunicatorGrid::connect(int64_t rank, int64_t world_size, const std::string& prefix) {
  const ncclUniqueId id = share_nccl_id(*store_, prefix + "/nccl", rank, options_.timeout);
  ncclConfig_t settings = config();
  ncclComm_t& comm = made_.emplace_back(nullptr);
  const ncclResult_t result = ncclCommInitRankConfig(&comm, static_cast<int>(world_size), id,
                                                     static_cast<int>(rank), &settings);
  parent_ = comm;  // so that it is aborted if the next line throws
  settle(result, comm, "connecting " + std::to_string(world_size) + " ranks");
  return comm;
}

// An axis shares no resources with the parent, because both run at the same time.
std::unique_ptr<Communicator> CommunicatorGrid::split(const AxisRanks& axis) {
  ncclConfig_t settings = config();
  ncclComm_t& comm = made_.emplace_back(nullptr);
  const std::string what = "splitting off axis " + axis.name;
  try {
    settle(ncclCommSplit(parent_, colour_of(axis), key_of(axis, rank_), &comm, &settings), parent_,
           what);
    settle(ncclInProgress, comm, what);
    return std::unique_ptr<Communicator>(new Communicator(*this, axis, comm));
  } catch (...) {  // nothing owns the communicator yet
    if (comm != nullptr) (void)ncclCommAbort(comm);
    throw;
  }
}

ncclConfig_t CommunicatorGrid::config() const {
  ncclConfig_t settings = NCCL_CONFIG_INITIALIZER;
  settings.blocking = 0;
  settings.splitShare = 0;
  if (options_.max_ctas > 0) settings.maxCTAs = options_.max_ctas;
  return settings;
}

void CommunicatorGrid::settle(ncclResult_t result, ncclComm_t comm, const std::string& what) const {
  settle_nccl(result, comm, what, options_.timeout, [this] {
    if (watch_ != nullptr) check();  // a peer that has failed will not join the call
  });
}

// Runs on the watching thread, which may query events while another thread captures a graph.
void CommunicatorGrid::check_health() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  AXONN_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
  AXONN_CUDA_CHECK(cudaSetDevice(options_.device));
  for (const auto& one : communicators_) one->check_async();
}

// An abort waits for the communicator's own kernels, which may be queued behind those of another
// axis. In a group, NCCL signals the kernels of all communicators before it waits for any.
void CommunicatorGrid::abort_all() {
  const bool grouped = ncclGroupStart() == ncclSuccess;
  for (const auto& one : communicators_) one->abort();
  {
    const std::lock_guard lock(parent_mutex_);
    if (parent_ != nullptr) (void)ncclCommAbort(std::exchange(parent_, nullptr));
  }
  if (grouped) (void)ncclGroupEnd();
}

}  // namespace axonn::comm
