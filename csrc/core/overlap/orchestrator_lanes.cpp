#include "core/overlap/orchestrator_lanes.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

namespace axonn::orchestrator {

double Lanes::now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int64_t Lanes::add_lane(std::string name) {
  const std::lock_guard lock(mutex_);
  lanes_.emplace_back();
  lanes_.back().totals.name = std::move(name);
  return static_cast<int64_t>(lanes_.size()) - 1;
}

int64_t Lanes::submit(int64_t lane, std::string name, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  auto& l = lanes_.at(lane);
  const int64_t sequence = l.next_sequence++;
  l.open.push_back(
      {.name = std::move(name), .sequence = sequence, .bytes = bytes, .submitted = now()});
  return sequence;
}

void Lanes::finished(int64_t lane, int64_t sequence) {
  const std::lock_guard lock(mutex_);
  auto& l = lanes_.at(lane);
  auto& task = *find(lane, sequence);
  task.finished = now();
  finish(l, task);
}

void Lanes::retire(int64_t lane, int64_t sequence, double waited_from) {
  const std::lock_guard lock(mutex_);
  auto& l = lanes_.at(lane);
  const auto position = find(lane, sequence);
  auto& task = *position;
  if (task.finished < 0) throw std::logic_error("Lanes: a task is retired before it is finished");
  task.waited_from = waited_from;
  task.waited_to = now();
  count(l, position);
}

void Lanes::retire_measured(int64_t lane, int64_t sequence, const Times& times) {
  const std::lock_guard lock(mutex_);
  auto& l = lanes_.at(lane);
  const auto position = find(lane, sequence);
  position->submitted = times.submitted;
  position->finished = times.finished;
  position->waited_from = times.waited_from;
  position->waited_to = times.waited_to;
  finish(l, *position);
  count(l, position);
}

// A lane runs one task after the other, so their times do not overlap.
void Lanes::finish(Lane& lane, Task& task) {
  task.started = std::min(std::max(task.submitted, lane.last_finished), task.finished);
  lane.last_finished = std::max(lane.last_finished, task.finished);
}

void Lanes::count(Lane& lane, std::deque<Task>::iterator task) {
  lane.totals.num_tasks += 1;
  lane.totals.bytes += task->bytes;
  lane.totals.busy += task->finished - task->started;
  lane.totals.exposed += task->waited_to - task->waited_from;
  if (recording_) lane.records.push_back(*task);
  lane.open.erase(task);
}

LaneTotals Lanes::totals(int64_t lane) const {
  const std::lock_guard lock(mutex_);
  return lanes_.at(lane).totals;
}

void Lanes::record(bool on) {
  const std::lock_guard lock(mutex_);
  recording_ = on;
}

std::vector<Task> Lanes::take_records(int64_t lane) {
  const std::lock_guard lock(mutex_);
  return std::exchange(lanes_.at(lane).records, {});
}

std::deque<Task>::iterator Lanes::find(int64_t lane, int64_t sequence) {
  auto& open = lanes_.at(lane).open;
  const auto found = std::find_if(open.begin(), open.end(),
                                  [&](const Task& task) { return task.sequence == sequence; });
  if (found == open.end()) {
    throw std::logic_error("Lanes: task " + std::to_string(sequence) + " of lane " +
                           lanes_[lane].totals.name + " is not open");
  }
  return found;
}

}  // namespace axonn::orchestrator
