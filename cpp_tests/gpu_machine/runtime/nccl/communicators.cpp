// The life of communicators: creation, splits, finalization, destruction and aborts.
#include "gpu_machine/runtime/nccl/communicators.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <sstream>

namespace axonn::gpu_machine::nccl {
namespace {

constexpr int kMostCtas = 64;        // Source: NCCL, MAXCHANNELS
constexpr int kMostClusterCtas = 8;  // Source: NCCL, NCCL_MAX_CGA_CLUSTER_SIZE

// Whether a pointer points into this thread's stack.
bool is_on_stack(const void* pointer) {
  pthread_attr_t attributes;
  void* begin = nullptr;
  size_t size = 0;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &begin, &size);
  pthread_attr_destroy(&attributes);
  const auto* at = static_cast<const char*>(pointer);
  return at >= begin && at < static_cast<char*>(begin) + size;
}

bool is_unset(int value) { return value == NCCL_CONFIG_UNDEF_INT; }

// Returns false if NCCL refuses the configuration.
bool read_config(const ncclConfig_t* from, Config& config) {
  if (from == nullptr) return true;
  const ncclConfig_t made = NCCL_CONFIG_INITIALIZER;  // NCCL_API_MAGIC exists since NCCL 2.29
  if (from->size != made.size || from->magic != made.magic) return false;
  const auto in = [](int value, int least, int most) {
    return is_unset(value) || (value >= least && value <= most);
  };
  if (!in(from->blocking, 0, 1) || !in(from->splitShare, 0, 1) ||
      !in(from->minCTAs, 1, kMostCtas) || !in(from->maxCTAs, 1, kMostCtas) ||
      !in(from->cgaClusterSize, 0, kMostClusterCtas)) {
    return false;
  }
  if (!is_unset(from->blocking)) config.blocking = from->blocking == 1;
  if (!is_unset(from->minCTAs)) config.min_ctas = from->minCTAs;
  if (!is_unset(from->maxCTAs)) config.max_ctas = from->maxCTAs;
  if (!is_unset(from->cgaClusterSize)) config.cluster = from->cgaClusterSize;
  if (!is_unset(from->splitShare)) config.shares = from->splitShare == 1;
  return config.max_ctas == 0 || config.min_ctas <= config.max_ctas;
}

// A rank's color and key in the n-th split.
std::string wish_of(int64_t split, int rank) {
  return "split" + std::to_string(split) + "." + std::to_string(rank);
}

void tell_by_wire(const Wire& wire, int64_t split, int rank, std::pair<int, int> wish) {
  wire.put(wish_of(split, rank), std::to_string(wish.first) + " " + std::to_string(wish.second));
}

void ask_by_wire(const Wire& wire, int64_t split, int size,
                 std::map<int, std::pair<int, int>>& wishes) {
  for (int rank = 0; rank < size; ++rank) {
    const auto text = wire.text(wish_of(split, rank));
    if (!text) continue;
    std::istringstream numbers(*text);
    numbers >> wishes[rank].first >> wishes[rank].second;
  }
}

}  // namespace

Nccl::Nccl(Runtime& of_runtime) : runtime(of_runtime) {
  runtime.background = [this] { return work_in_background(); };
}

Nccl& Nccl::current() {
  Runtime& runtime = Runtime::current();
  if (runtime.nccl == nullptr) runtime.nccl = std::make_shared<Nccl>(runtime);
  return *static_cast<Nccl*>(runtime.nccl.get());
}

CommPtr Nccl::find(ncclComm_t comm, const char* function) {
  for (const CommPtr& known : comms_) {
    if (known.get() != comm) continue;
    if (known->state != ncclComm::State::kGone) return known;
    (void)misuse(std::string(function) + " of " + known->name() + ", which is destroyed");
    return nullptr;
  }
  (void)misuse(std::string(function) + " of a communicator that NCCL did not make");
  return nullptr;
}

ncclResult_t Nccl::refuse(ncclResult_t result, const std::string& why) {
  last_error_ = why;
  return result;
}

ncclResult_t Nccl::misuse(const std::string& what) {
  (void)runtime.end(MachineError(MachineError::Kind::kMisuse, "NCCL: " + what));
  return refuse(ncclInvalidUsage, what);
}

ncclResult_t Nccl::check_usable(const ncclComm& comm, const char* what) {
  if (comm.async == ncclInProgress) {
    return refuse(ncclInvalidArgument, std::string(what) + ": " + comm.name() +
                                           " is used before the operation before has succeeded");
  }
  if (comm.async != ncclSuccess) {
    return refuse(comm.async, std::string(what) + ": " + comm.name() + " has failed before");
  }
  if (comm.state == ncclComm::State::kFinalized) {
    return misuse(std::string(what) + " of " + comm.name() + ", which is finalized");
  }
  return ncclSuccess;
}

// --- Making -----------------------------------------------------------------------

ncclResult_t Nccl::unique_id(ncclUniqueId& id) {
  std::string text = "id " + std::to_string(++ids_);
  if (!runtime.options.wire_folder.empty()) {
    text += " of process " + std::to_string(getpid()) + " at " +
            std::to_string(std::chrono::system_clock::now().time_since_epoch().count());
  }
  std::memset(&id, 0, sizeof id);
  std::memcpy(id.internal, text.data(), text.size());
  cliques_[text] = make_clique("communicator " + std::to_string(ids_));
  if (cliques_[text]->wire != nullptr) cliques_.erase(text);  // init creates it, in each process
  return ncclSuccess;
}

std::shared_ptr<Clique> Nccl::make_clique(const std::string& name) {
  auto clique = std::make_shared<Clique>();
  clique->name = name;
  const std::string& folder = runtime.options.wire_folder;
  if (!folder.empty()) clique->wire = std::make_shared<Wire>(folder, name);
  return clique;
}

CommPtr Nccl::make_comm(std::shared_ptr<Clique> clique, int rank, int device,
                        const Config& config) {
  auto comm = std::make_shared<ncclComm>();
  comm->clique = std::move(clique);
  comm->rank = rank;
  comm->device = device;
  comm->config = config;
  comm->order = std::make_shared<LaunchOrder>();
  comms_.push_back(comm);
  return comm;
}

ncclResult_t Nccl::init(ncclComm_t* made, int size, const ncclUniqueId& id, int rank,
                        const ncclConfig_t* from) {
  *made = nullptr;
  Config config;
  if (!read_config(from, config)) return refuse(ncclInvalidArgument, "a configuration is invalid");
  if (size < 1 || rank < 0 || rank >= size) {
    return refuse(ncclInvalidArgument,
                  "rank " + std::to_string(rank) + " of " + std::to_string(size) + " is invalid");
  }
  if (!runtime.options.wire_folder.empty() && !cliques_.contains(id.internal)) {
    cliques_[id.internal] = make_clique(std::string("communicator of ") + id.internal);
  }
  const auto found = cliques_.find(id.internal);
  if (found == cliques_.end()) return refuse(ncclInvalidArgument, "an id is none of NCCL's");
  const CommPtr comm = make_comm(found->second, rank, runtime.device, config);
  *made = comm.get();
  Clique& clique = *found->second;
  if (clique.size != 0 && clique.size != size) {
    return misuse(comm->name() + " is to have " + std::to_string(size) + " ranks, for others " +
                  std::to_string(clique.size));
  }
  clique.size = size;
  (void)group_start();
  group().jobs.push_back(joining(comm, made));
  return group_end();
}

Job Nccl::joining(const CommPtr& comm, ncclComm_t* made) {
  Job job;
  job.comm = comm;
  job.waits_for = "a rank waits for the others of " + comm->clique->name;
  job.attempt = [this, comm]() -> std::optional<ncclResult_t> {
    Clique& clique = *comm->clique;
    const auto [place, is_new] = clique.members.emplace(comm->rank, comm.get());
    if (place->second != comm.get()) {
      return misuse("two ranks " + std::to_string(comm->rank) + " of " + clique.name);
    }
    const Config& first = clique.members.begin()->second->config;
    if (first.min_ctas != comm->config.min_ctas || first.max_ctas != comm->config.max_ctas) {
      return misuse("ranks of " + clique.name + " have different configurations");
    }
    if (!have_all_joined(*comm)) return std::nullopt;
    if (clique.ring.empty()) choose_for(clique);
    comm->state = ncclComm::State::kReady;
    return ncclSuccess;
  };
  // NCCL's thread stores the communicator once more when it ends, however it ends. By then the
  // function that gave up waiting may have returned, so a variable on its stack is refused.
  job.cancel = [this, made] {
    if (is_on_stack(made)) {
      (void)misuse("an initialization is aborted that stores its communicator on a stack");
    }
  };
  return job;
}

bool Nccl::have_all_joined(const ncclComm& comm) const {
  const Clique& clique = *comm.clique;
  if (clique.wire == nullptr) return static_cast<int>(clique.members.size()) == clique.size;
  const std::string own = "member" + std::to_string(comm.rank);
  if (!clique.wire->has(own)) clique.wire->put(own);
  for (int rank = 0; rank < clique.size; ++rank) {
    if (!clique.wire->has("member" + std::to_string(rank))) return false;
  }
  return true;
}

// Choices that ranks in several processes must share are drawn from the name that all know.
void Nccl::choose_for(Clique& clique) {
  auto random = random_of(clique.name);
  const auto draw = [&](uint32_t below) {
    return clique.wire == nullptr ? runtime.machine.draw(below)
                                  : static_cast<uint32_t>(random() % below);
  };
  for (int rank = 0; rank < clique.size; ++rank) clique.ring.push_back(rank);
  for (size_t i = clique.ring.size(); i > 1; --i) {
    std::swap(clique.ring[i - 1], clique.ring[draw(static_cast<uint32_t>(i))]);
  }
  // By default, NCCL takes a small part of the GPU.
  const Config& config = clique.members.begin()->second->config;
  const int usual = std::max(1, runtime.machine.options().resident_ctas / 4);
  clique.max_ctas = config.max_ctas != 0 ? config.max_ctas : std::max(usual, config.min_ctas);
  clique.min_ctas = std::max(1, config.min_ctas);
  const auto drawn = 1 + draw(static_cast<uint32_t>(clique.max_ctas));
  clique.transfer_ctas = static_cast<int>(std::bit_ceil(drawn));  // as NCCL rounds
  clique.connects_late = clique.wire == nullptr && !config.blocking && draw(2) == 0;
}

ncclResult_t Nccl::init_all(ncclComm_t* comms, int count, const int* devices) {
  ncclUniqueId id;
  if (const ncclResult_t result = unique_id(id)) return result;
  const int before = runtime.device;
  (void)group_start();
  for (int rank = 0; rank < count; ++rank) {
    runtime.device = devices != nullptr ? devices[rank] : rank;
    const ncclResult_t result = init(comms + rank, count, id, rank, nullptr);
    if (result != ncclSuccess && group().error == ncclSuccess) group().error = result;
  }
  runtime.device = before;
  return group_end();
}

ncclResult_t Nccl::split(ncclComm& parent, int colour, int key, ncclComm_t* made,
                         const ncclConfig_t* from) {
  if (const ncclResult_t result = check_usable(parent, "ncclCommSplit")) return result;
  *made = nullptr;
  Config config = from == nullptr ? parent.config : Config{};
  if (!read_config(from, config)) return refuse(ncclInvalidArgument, "a configuration is invalid");
  const int64_t number = parent.splits++;
  const CommPtr of = parent.shared_from_this();
  Job job;
  job.comm = of;
  job.waits_for = of->name() + " waits for its other ranks";
  job.attempt = [=, this]() -> std::optional<ncclResult_t> {
    Clique& clique = *of->clique;
    auto& wishes = clique.splits[number];
    if (clique.wire != nullptr) ask_by_wire(*clique.wire, number, clique.size, wishes);
    if (!wishes.contains(of->rank)) {
      wishes[of->rank] = {colour, key};
      if (clique.wire != nullptr) tell_by_wire(*clique.wire, number, of->rank, wishes[of->rank]);
    }
    if (static_cast<int>(wishes.size()) < clique.size) return std::nullopt;
    if (colour == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    std::vector<std::pair<int, int>> members;  // key and rank
    for (const auto& [rank, wish] : wishes) {
      if (wish.first == colour) members.emplace_back(wish.second, rank);
    }
    std::sort(members.begin(), members.end());
    auto& part = clique.parts[{number, colour}];
    if (part == nullptr) {
      part = make_clique(clique.name + ", split " + std::to_string(number) + ", colour " +
                         std::to_string(colour));
      part->size = static_cast<int>(members.size());
    }
    const auto own = std::find(members.begin(), members.end(), std::pair(key, of->rank));
    if (!part->members.contains(static_cast<int>(own - members.begin()))) {
      const CommPtr child =
          make_comm(part, static_cast<int>(own - members.begin()), of->device, config);
      if (of->config.shares) child->order = of->order;
      part->members[child->rank] = child.get();
    }
    ncclComm* child = part->members[static_cast<int>(own - members.begin())];
    if (!have_all_joined(*child)) return std::nullopt;
    if (part->ring.empty()) choose_for(*part);
    child->state = ncclComm::State::kReady;
    child->async = ncclSuccess;
    *made = child;
    return ncclSuccess;
  };
  job.cancel = joining(of, made).cancel;
  (void)group_start();
  group().jobs.push_back(std::move(job));
  return group_end();
}

// --- Ending -----------------------------------------------------------------------

Job Nccl::ending(const CommPtr& comm, const char* what, bool frees) {
  Job job;
  job.comm = comm;
  job.waits_for = std::string(what) + " of " + comm->name() + " waits for its kernels, and for " +
                  "the graphs that hold kernels of it to be destroyed";
  job.always_blocks = frees;
  job.attempt = [comm, frees]() -> std::optional<ncclResult_t> {
    if (comm->kernels != 0 || comm->has_graphs()) return std::nullopt;
    comm->state = frees ? ncclComm::State::kGone : ncclComm::State::kFinalized;
    return ncclSuccess;
  };
  return job;
}

ncclResult_t Nccl::finalize(ncclComm& comm) {
  if (const ncclResult_t result = check_usable(comm, "ncclCommFinalize")) return result;
  (void)group_start();
  group().jobs.push_back(ending(comm.shared_from_this(), "ncclCommFinalize", false));
  return group_end();
}

ncclResult_t Nccl::destroy(ncclComm& comm) {
  if (comm.async == ncclInProgress) return check_usable(comm, "ncclCommDestroy");
  (void)group_start();
  group().jobs.push_back(ending(comm.shared_from_this(), "ncclCommDestroy", true));
  return group_end();
}

// The flag that ends kernels is set at once, even in a group; pending jobs are given up.
ncclResult_t Nccl::abort(ncclComm& comm) {
  comm.aborted = true;
  for (auto job = jobs_.begin(); job != jobs_.end();) {
    if (job->comm.get() != &comm) {
      ++job;
      continue;
    }
    job->cancel();
    job = jobs_.erase(job);
  }
  tell_peers_of_abort(comm);
  (void)group_start();
  group().jobs.push_back(ending(comm.shared_from_this(), "ncclCommAbort", true));
  return group_end();
}

// Some peers notice, over the network, that a rank has gone. Nothing guarantees it.
void Nccl::tell_peers_of_abort(const ncclComm& comm) {
  if (comm.clique->wire != nullptr) comm.clique->wire->put("aborted");
  for (const auto& [rank, peer] : comm.clique->members) {
    if (peer == &comm || peer->aborted || runtime.machine.draw(2) == 0) continue;
    peer->remote_error_in = static_cast<int>(runtime.machine.draw(4));
  }
}

ncclResult_t Nccl::async_error(ncclComm& comm, ncclResult_t& state) {
  if (comm.remote_error_in >= 0 && comm.remote_error_in-- == 0) comm.async = ncclRemoteError;
  if (comm.clique->wire != nullptr && comm.clique->wire->has("aborted")) {
    comm.async = ncclRemoteError;
  }
  state = comm.async;
  return ncclSuccess;
}

bool Nccl::work_in_background() {
  bool did = false;
  for (auto job = jobs_.begin(); job != jobs_.end();) {
    if (job->delay > 0) {
      --job->delay;
      did = true;
    } else if (const std::optional<ncclResult_t> result = job->attempt()) {
      // Several jobs of one group may belong to the same communicator.
      const CommPtr comm = job->comm;
      job = jobs_.erase(job);
      did = true;
      const bool more = std::any_of(jobs_.begin(), jobs_.end(),
                                    [&](const Job& other) { return other.comm == comm; });
      if (*result != ncclSuccess) comm->async = *result;
      if (!more && comm->async == ncclInProgress) comm->async = ncclSuccess;
      continue;
    }
    ++job;
  }
  return did;
}

}  // namespace axonn::gpu_machine::nccl

bool ncclComm::has_graphs() const {
  return std::any_of(graphs.begin(), graphs.end(),
                     [](const std::weak_ptr<void>& graph) { return !graph.expired(); });
}
