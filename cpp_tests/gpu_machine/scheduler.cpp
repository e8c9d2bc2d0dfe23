// What runs next. GPUs promise little about that, so a seeded adversary decides: which stream,
// which CTA, which warp, for how long, and which warps are starved for a while.
#include <algorithm>
#include <numeric>
#include <utility>

#include "gpu_machine/machine.h"
#include "gpu_machine/strong.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint32_t kLongestTurn = 64;     // warp instructions
constexpr uint64_t kLargestFlag = 8;      // bytes that a copy engine writes as one unit
constexpr uint32_t kStarvedTurns = 4096;  // average number of turns until others are starved
constexpr uint32_t kTurnsOfCopy = 4;      // average number of warp turns per piece of a copy
constexpr uint32_t kSlowCopies = 8;       // one copy in this many is slow
constexpr uint32_t kSlowestCopyLog2 = 8;  // a slow one takes up to 2 to this power as long

class CopyEngine : public Agent {
 public:
  using Agent::Agent;
  [[noreturn]] void fail(MachineError::Kind kind, const std::string& what, int) const override {
    throw MachineError(kind, "copy engine of rank " + std::to_string(actor.device) + ": " + what);
  }
};

}  // namespace

void Machine::run() {
  last_change_ = instructions_;
  for (Turn went = Turn::kWent; went != Turn::kDone;) {
    went = turn();
    if (went == Turn::kStuck) fail_deadlock("nobody can go on");
  }
  for (const Stream& stream : streams_) host_clock_.join(stream.clock);
  forget_the_past();
}

Machine::Turn Machine::turn() {
  bool has_work = false;
  for (Stream& stream : streams_) {
    if (stream.queue.empty()) continue;
    has_work = true;
    if (!stream.has_begun && draw(2) == 0) begin_work(stream);
  }
  if (!has_work) return Turn::kDone;
  start_ctas();
  const bool copied = step_copies();
  const bool done = step_tasks();
  const bool performed = async_.step();
  const bool ran = step_warps();
  if (copied || done || performed || ran || async_.step_first()) return Turn::kWent;
  const bool some_begin = std::any_of(streams_.begin(), streams_.end(), [](const Stream& s) {
    return !s.queue.empty() && !s.has_begun;
  });
  return some_begin ? Turn::kWent : Turn::kStuck;
}

void Machine::forget_the_past() {
  const auto is_over = [this](const Stream& s) {
    return s.queue.empty() && (s.last_ended == 0 || host_clock_.has_seen(0, s.last_ended, 1));
  };
  if (!std::all_of(streams_.begin(), streams_.end(), is_over)) return;
  first_actor_ = static_cast<uint32_t>(actors_.size());
  host_clock_ = told_to_others_ = Clock{};
  for (Stream& stream : streams_) {
    stream.clock = Clock{};
    stream.before_last.reset();
    stream.last_ended = 0;
  }
}

void Machine::begin_work(Stream& stream) {
  stream.has_begun = true;
  Work& work = stream.queue.front();
  stream.clock.join(work.before);
  note_change();
  if (work.task != nullptr && work.task->only_orders) {
    const Actor nobody{.device = stream.device};
    work.task->agent = std::make_unique<CopyEngine>(*this, nobody, stream.clock);
    return;
  }
  const uint32_t id = ++launches_;
  if (work.launch != nullptr) {
    work.launch->id = id;
    work.launch->prior = work.launch->before = stream.clock;
    if (work.launch->overlaps && stream.before_last) {
      work.launch->before = *stream.before_last;
      work.launch->before.join(work.before);
    }
    work.launch->order.resize(work.launch->grid.count() / work.launch->cluster.count());
    std::iota(work.launch->order.begin(), work.launch->order.end(), 0u);
    std::shuffle(work.launch->order.begin(), work.launch->order.end(), random_);
    return;
  }
  if (work.task != nullptr) {
    work.task->launch = id;
    work.task->agent =
        std::make_unique<CopyEngine>(*this, new_actor({0, id, stream.device}), stream.clock);
    return;
  }
  Copy& copy = *work.copy;
  copy.launch = id;
  copy.engine =
      std::make_unique<CopyEngine>(*this, new_actor({0, id, stream.device}), stream.clock);
  copy.engine->clock.forget_fences_of_ends();
  copy.turns_a_piece = kTurnsOfCopy;
  if (draw(kSlowCopies) == 0) copy.turns_a_piece <<= draw(kSlowestCopyLog2 + 1);
  // Up to four pieces, cut at even bytes.
  std::vector<uint64_t> cuts{0, copy.bytes};
  for (int i = 0; i < 3 && copy.bytes > kLargestFlag; ++i) {
    cuts.push_back(random_() % copy.bytes / 2 * 2);
  }
  std::sort(cuts.begin(), cuts.end());
  for (size_t i = 1; i < cuts.size(); ++i) {
    if (cuts[i] > cuts[i - 1]) copy.pieces.emplace_back(cuts[i - 1], cuts[i]);
  }
  std::shuffle(copy.pieces.begin(), copy.pieces.end(), random_);
}

void Machine::end_work(Stream& stream) {
  Work work = std::move(stream.queue.front());
  stream.queue.pop_front();
  stream.has_begun = false;
  stream.before_last.reset();
  if (work.launch != nullptr) {
    stream.clock.join(work.launch->after);
    stream.before_last = std::move(work.launch->before);
  }
  if (work.task != nullptr) stream.clock.join(work.task->agent->clock);
  note_change();
  if (work.task != nullptr && work.task->only_orders) return;
  stream.last_ended = work.launch != nullptr ? work.launch->id
                      : work.copy != nullptr ? work.copy->launch
                                             : work.task->launch;
  note_end_of(stream.last_ended, stream.clock);
}

// From now on clocks refer to the launch as a whole. What they know of its actors, which are many,
// would fill all clocks.
void Machine::note_end_of(uint32_t launch, Clock& clock) {
  const auto is_its = [&](uint32_t actor) { return actors_[actor].launch == launch; };
  clock.forget_actors(is_its);
  clock.see_launch(launch);
  if (told_to_others_.forget_actors(is_its)) told_to_others_.see_launch(launch);
}

void Machine::start_ctas() {
  for (Stream& stream : streams_) {
    if (!stream.has_begun || stream.queue.front().launch == nullptr) continue;
    Launch& launch = *stream.queue.front().launch;
    const uint64_t ctas = launch.cluster.count();
    // A cooperative grid needs room for all of its CTAs at once, whatever else wants to run.
    const uint64_t together = launch.is_cooperative ? launch.grid.count() : ctas;
    while (launch.next_cluster < launch.order.size() &&
           (launch.is_cooperative ||
            resident_[launch.device] + static_cast<int>(ctas) <= options_.resident_ctas)) {
      const auto sms =
          residency(launch.device)
              .take(launch.footprint, together, draw(static_cast<uint32_t>(options_.sms)));
      if (!sms) break;
      for (uint64_t first = 0; first < together; first += ctas) {
        const auto begin = sms->begin() + static_cast<int64_t>(first);
        start_cluster(launch, {begin, begin + static_cast<int64_t>(ctas)});
      }
    }
  }
}

bool Machine::step_tasks() {
  bool went = false;
  for (Stream& stream : streams_) {
    if (!stream.has_begun || stream.queue.front().task == nullptr) continue;
    Task& task = *stream.queue.front().task;
    const Progress progress = task.attempt(*task.agent);
    if (progress == Progress::kDone) end_work(stream);
    went = went || progress != Progress::kWaits;
  }
  return went;
}

bool Machine::step_copies() {
  bool copied = false;
  for (Stream& stream : streams_) {
    if (!stream.has_begun || stream.queue.front().copy == nullptr) continue;
    copied = true;
    if (draw(stream.queue.front().copy->turns_a_piece) == 0) step_copy(stream);
  }
  return copied;
}

void Machine::step_copy(Stream& stream) {
  Copy& copy = *stream.queue.front().copy;
  if (!copy.pieces.empty()) {
    const auto [begin, end] = copy.pieces.back();
    copy.pieces.pop_back();
    const auto bytes = static_cast<uint32_t>(end - begin);
    const bool is_flag = copy.bytes <= kLargestFlag;
    const Access read{},
        write{is_flag ? Order::kRelease : Order::kWeak, is_flag ? Scope::kSystem : Scope::kNone};
    const auto region_of = [&](uint64_t address) -> Region& {
      Region* region = memory_.find(address);
      if (region == nullptr || region->freed ||
          (address & (window_start(1) - 1)) + bytes > region->bytes.size()) {
        copy.engine->fail(MachineError::Kind::kMemory, "copies outside an allocation", -1);
      }
      return *region;
    };
    Region& target = region_of(copy.target + begin);
    const uint64_t to = (copy.target + begin) & (window_start(1) - 1);
    if (copy.fill >= 0) {
      copy.engine->note_write(target, to, bytes, write, -1);
      std::memset(target.bytes.data() + to, copy.fill, bytes);
    } else {
      Region& source = region_of(copy.source + begin);
      const uint64_t from = (copy.source + begin) & (window_start(1) - 1);
      copy.engine->note_read(source, from, bytes, read, -1);
      copy.engine->note_write(target, to, bytes, write, -1);
      const bool is_word = (bytes == 4 || bytes == 8) && to % bytes == 0 && from % bytes == 0;
      if (is_flag && is_word) {
        uint64_t flag = 0;
        load_strong(&flag, source.bytes.data() + from, bytes);
        store_strong(target.bytes.data() + to, &flag, bytes);
      } else {
        std::memmove(target.bytes.data() + to, source.bytes.data() + from, bytes);
      }
    }
    note_change();
  }
  if (copy.pieces.empty()) end_work(stream);
}

bool Machine::step_warps() {
  if (live_.empty()) return false;
  if (draw(kStarvedTurns) == 0) starved_ = draw(8);
  Warp* warp = choose_warp();
  if (warp == nullptr) return false;
  asleep_since_.reset();
  const int ran = warp->run(static_cast<int>(1 + draw(kLongestTurn)));
  instructions_ += static_cast<uint64_t>(ran);
  now_ns_ += static_cast<uint64_t>(ran);
  if (warp->has_exited()) retire(*warp);
  if (instructions_ - last_change_ > options_.patience) {
    fail_deadlock("no memory has changed for " + std::to_string(options_.patience) +
                  " warp instructions");
  }
  return true;
}

// Returns null if all warps wait for each other. If the rest sleep, advances time to wake one.
Warp* Machine::choose_warp() {
  const auto size = static_cast<uint32_t>(live_.size());
  for (int attempt = 0; attempt < 4; ++attempt) {
    Warp* warp = live_[draw(size)];
    const bool is_starved = warp->actor.id % 8 == starved_ && draw(32) != 0;
    if (!is_starved && warp->wake_at <= now_ns_ && !warp->is_blocked()) return warp;
  }
  Warp* earliest = nullptr;
  const uint32_t start = draw(size);
  for (uint32_t i = 0; i < size; ++i) {
    Warp* warp = live_[(start + i) % size];
    if (warp->is_blocked()) continue;
    if (warp->wake_at <= now_ns_) return warp;
    if (earliest == nullptr || warp->wake_at < earliest->wake_at) earliest = warp;
  }
  // Operations that are due before the warps wake up come first.
  if (earliest == nullptr || async_.first_due_ns() < earliest->wake_at) return nullptr;
  return sleep_until(earliest->wake_at) ? earliest : nullptr;
}

// Returns whether that time has come, now that all warps sleep.
bool Machine::sleep_until(uint64_t wake_at_ns) {
  if (!options_.sleeps_for_real) {
    now_ns_ = wake_at_ns;
    return true;
  }
  const auto now = std::chrono::steady_clock::now();
  if (!asleep_since_) {
    asleep_since_ = now;
    asleep_at_ns_ = now_ns_;
  }
  const std::chrono::nanoseconds passed = now - *asleep_since_;
  now_ns_ = std::max(now_ns_, asleep_at_ns_ + static_cast<uint64_t>(passed.count()));
  return now_ns_ >= wake_at_ns;
}

void Machine::fail_deadlock(const std::string& why) {
  std::string text = "deadlock: " + why;
  int told = 0;
  for (const Warp* warp : live_) {
    if (++told > 16) {
      text += "\n  and " + std::to_string(live_.size() - 16) + " more warps";
      break;
    }
    text += "\n  rank " + std::to_string(warp->launch.device) + ", kernel " +
            short_name(warp->launch.program->name) + ", CTA (" + std::to_string(warp->cta.index.x) +
            ", " + std::to_string(warp->cta.index.y) + ", " + std::to_string(warp->cta.index.z) +
            "), warp " + std::to_string(warp->index) + ": " + warp->describe_wait();
  }
  for (size_t i = 0; i < streams_.size(); ++i) {
    const Stream& stream = streams_[i];
    if (!stream.has_begun || stream.queue.front().task == nullptr) continue;
    text += "\n  rank " + std::to_string(stream.device) + ", stream " + std::to_string(i) + ": " +
            stream.queue.front().task->describe();
  }
  throw MachineError(MachineError::Kind::kDeadlock, text);
}

}  // namespace axonn::gpu_machine
