#include "gpu_machine/runtime/nccl/kernel.h"

#include <algorithm>
#include <numeric>

namespace axonn::gpu_machine::nccl {
namespace {

constexpr uint32_t kTurnsBetweenNaps = 4, kLongestNap = 100;  // lets others overtake a kernel

std::string list(const std::vector<Call>& calls) {
  std::string text;
  for (const Call& call : calls) text += (text.empty() ? "" : ", ") + describe(call);
  return text;
}

[[noreturn]] void fail_mismatch(const ncclComm& comm, int first, const std::string& theirs,
                                const std::string& ours) {
  throw MachineError(MachineError::Kind::kMisuse,
                     "NCCL: " + comm.clique->name + ": rank " + std::to_string(first) + " calls " +
                         theirs + " where rank " + std::to_string(comm.rank) + " calls " + ours);
}

}  // namespace

Kernel::Kernel(Nccl& nccl, CommPtr comm, std::vector<Call> calls)
    : nccl_(nccl), comm_(std::move(comm)), calls_(std::move(calls)) {
  ++comm_->kernels;
}

Choices Kernel::choose(const Call& call, const std::string& meeting) const {
  const Clique& clique = *comm_->clique;
  auto random = random_of(clique.name + meeting);
  const auto draw = [&](uint32_t below) {
    return clique.wire == nullptr ? nccl_.runtime.machine.draw(below)
                                  : static_cast<uint32_t>(random() % below);
  };
  Choices choices;
  choices.ring = clique.ring;
  const auto range = static_cast<uint32_t>(clique.max_ctas - clique.min_ctas + 1);
  choices.channels =
      call.is_transfer() ? clique.transfer_ctas : clique.min_ctas + static_cast<int>(draw(range));
  choices.buffers = draw(2) == 0;
  choices.rounding = draw(2) == 0 ? Rounding::kOnce : Rounding::kAtEachRank;
  for (uint32_t cuts = draw(4); cuts > 0; --cuts) {
    choices.cuts.push_back(draw(1000) / 1000.0);
  }
  std::sort(choices.cuts.begin(), choices.cuts.end());
  return choices;
}

MeetingPtr Kernel::make_meeting(const Call& call, const std::string& name) const {
  const Clique& clique = *comm_->clique;
  return std::make_shared<Meeting>(call, comm_->rank, clique.size, choose(call, name),
                                   Meeting::Place{name.empty() ? nullptr : clique.wire, name});
}

void Kernel::begin() {
  has_begun_ = true;
  std::vector<Call> collectives;
  for (const Call& call : calls_) {
    if (call.is_transfer()) {
      parts_.push_back({call, meet_transfer(call)});
    } else {
      collectives.push_back(call);
    }
  }
  if (!collectives.empty()) meet_collectives(collectives);
  int channels = 0;
  for (const Part& part : parts_) channels = std::max(channels, part.meeting->channels());
  ctas_.assign(static_cast<size_t>(channels), CtaState::kAbsent);
  const auto cluster = static_cast<size_t>(std::max(1, comm_->config.cluster));
  order_.resize((ctas_.size() + cluster - 1) / cluster);
  std::iota(order_.begin(), order_.end(), 0u);
  for (size_t i = order_.size(); i > 1; --i) {
    std::swap(order_[i - 1], order_[nccl_.runtime.machine.draw(static_cast<uint32_t>(i))]);
  }
}

void Kernel::meet_collectives(const std::vector<Call>& collectives) {
  Clique& clique = *comm_->clique;
  const int64_t number = comm_->rounds++;
  Round& round = clique.rounds[number];
  if (round.ranks.empty()) {
    round.first = comm_->rank;
    round.calls = collectives;
    for (const Call& call : collectives) {
      const std::string name =
          "round" + std::to_string(number) + "." + std::to_string(round.meetings.size());
      round.meetings.push_back(make_meeting(call, name));
    }
  }
  bool equal = round.calls.size() == collectives.size();
  for (size_t i = 0; equal && i < collectives.size(); ++i) {
    equal = agree(round.calls[i], collectives[i]);
  }
  if (!equal) fail_mismatch(*comm_, round.first, list(round.calls), list(collectives));
  for (size_t i = 0; i < collectives.size(); ++i) {
    parts_.push_back({collectives[i], round.meetings[i]});
  }
  round.ranks.insert(comm_->rank);
  const bool have_all_come = static_cast<int>(round.ranks.size()) == clique.size;
  if (have_all_come || clique.wire != nullptr) clique.rounds.erase(number);
}

MeetingPtr Kernel::meet_transfer(const Call& call) {
  Clique& clique = *comm_->clique;
  const bool sends = call.kind == Kind::kSend;
  const std::pair<int, int> pair =
      sends ? std::pair(comm_->rank, call.peer) : std::pair(call.peer, comm_->rank);
  auto& others = (sends ? clique.receives : clique.sends)[pair];
  if (clique.wire != nullptr && call.peer != comm_->rank) {
    return make_meeting(call, "transfer" + std::to_string(pair.first) + "-" +
                                  std::to_string(pair.second) + "." +
                                  std::to_string(comm_->transfers[pair]++));
  }
  if (others.empty()) {
    auto meeting = make_meeting(call, "");
    (sends ? clique.sends : clique.receives)[pair].push_back({call, comm_->rank, meeting});
    return meeting;
  }
  const Transfer other = others.front();
  others.pop_front();
  if (other.call.count != call.count || other.call.dtype != call.dtype) {
    fail_mismatch(*comm_, other.rank, nccl::describe(other.call), nccl::describe(call));
  }
  return other.meeting;
}

Progress Kernel::attempt(Agent& agent) {
  if (comm_->aborted) return leave();
  try {
    if (!has_begun_) begin();
    if (naps_ > 0) {
      --naps_;
      return Progress::kWent;
    }
    bool went = start_cluster();
    went = step(agent) || went;
    went = retire() || went;
    if (std::all_of(ctas_.begin(), ctas_.end(), [](CtaState s) { return s == CtaState::kLeft; }) &&
        is_over(-1)) {
      --comm_->kernels;
      return Progress::kDone;
    }
    if (!went) return Progress::kWaits;
    agent.machine.note_change();
    if (agent.machine.draw(kTurnsBetweenNaps) == 0) {
      naps_ = static_cast<int>(agent.machine.draw(kLongestNap));
    }
    return Progress::kWent;
  } catch (const MachineError& error) {
    if (error.kind() == MachineError::Kind::kMisuse) throw;
    throw MachineError(error.kind(), describe() + ": " + error.what());
  }
}

bool Kernel::start_cluster() {
  if (order_.empty()) return false;
  const auto cluster = static_cast<size_t>(std::max(1, comm_->config.cluster));
  const size_t first = order_.back() * cluster, end = std::min(first + cluster, ctas_.size());
  if (!nccl_.runtime.machine.take_ctas(comm_->device, static_cast<int>(end - first))) return false;
  order_.pop_back();
  std::fill(ctas_.begin() + static_cast<int64_t>(first), ctas_.begin() + static_cast<int64_t>(end),
            CtaState::kResident);
  return true;
}

// Moves a random one of the pieces that this rank can move now.
bool Kernel::step(Agent& agent) {
  size_t count = 0;
  for (const Part& part : parts_) count += part.meeting->num_pieces();
  if (count == 0) return false;
  size_t at = agent.machine.draw(static_cast<uint32_t>(count));
  size_t part = 0;
  while (at >= parts_[part].meeting->num_pieces()) at -= parts_[part++].meeting->num_pieces();
  for (size_t tried = 0; tried < count; ++tried) {
    Meeting& meeting = *parts_[part].meeting;
    if (is_resident(meeting.channel_of(at)) &&
        meeting.step(at, comm_->rank, parts_[part].call, agent)) {
      return true;
    }
    if (++at < meeting.num_pieces()) continue;
    at = 0;
    do {
      part = (part + 1) % parts_.size();
    } while (parts_[part].meeting->num_pieces() == 0);
  }
  return false;
}

bool Kernel::is_over(int channel) const {
  for (const Part& part : parts_) {
    for (size_t i = 0; i < part.meeting->num_pieces(); ++i) {
      if (part.meeting->channel_of(i) == channel && !part.meeting->is_over(i, comm_->rank)) {
        return false;
      }
    }
  }
  return true;
}

// The CTAs of a cluster leave together.
bool Kernel::retire() {
  bool some = false;
  const auto cluster = static_cast<size_t>(std::max(1, comm_->config.cluster));
  for (size_t first = 0; first < ctas_.size(); first += cluster) {
    const size_t end = std::min(first + cluster, ctas_.size());
    bool over = ctas_[first] == CtaState::kResident;
    for (size_t i = first; over && i < end; ++i) over = is_over(static_cast<int>(i));
    if (!over) continue;
    for (size_t i = first; i < end; ++i) ctas_[i] = CtaState::kLeft;
    nccl_.runtime.machine.give_ctas(comm_->device, static_cast<int>(end - first));
    some = true;
  }
  return some;
}

// The kernel notices that its communicator was aborted.
Progress Kernel::leave() {
  for (CtaState& cta : ctas_) {
    if (cta == CtaState::kResident) nccl_.runtime.machine.give_ctas(comm_->device, 1);
    cta = CtaState::kLeft;
  }
  --comm_->kernels;
  return Progress::kDone;
}

std::string Kernel::describe() const {
  std::string text = "NCCL, " + comm_->name() + ": " + list(calls_);
  std::set<int> awaited;
  for (const Part& part : parts_) part.meeting->add_awaited(comm_->rank, awaited);
  const auto absent = std::count(ctas_.begin(), ctas_.end(), CtaState::kAbsent);
  if (absent != 0) text += ", has no SM for " + std::to_string(absent) + " CTAs";
  if (!awaited.empty()) text += ", waits for";
  for (const int rank : awaited) text += " rank " + std::to_string(rank);
  return text;
}

}  // namespace axonn::gpu_machine::nccl
