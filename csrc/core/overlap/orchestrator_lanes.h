// The lanes of a run, one for each axis that communicates. They record which tasks were issued, in
// order, when each was done, and how long the program waited for it.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace axonn::orchestrator {

// One collective. Times are seconds of a steady clock; a negative time is not known yet.
struct Task {
  std::string name;  // collective and parameter, for display
  int64_t sequence;  // within the lane, from 0
  int64_t bytes;     // held by the task until it is retired
  double submitted;
  double started = -1;  // when the lane started it
  double finished = -1;
  double waited_from = -1;
  double waited_to = -1;
};

struct LaneTotals {
  std::string name;
  int64_t num_tasks = 0;
  int64_t bytes = 0;
  double busy = 0;     // seconds in which the lane had a task in flight
  double exposed = 0;  // seconds in which the program waited for the lane
  double hidden() const { return busy > exposed ? busy - exposed : 0.0; }
};

// When a task ran and when the program waited for it, as device events report afterwards, in
// seconds of Lanes::now().
struct Times {
  double submitted;
  double finished;
  double waited_from;
  double waited_to;
};

// Tasks of a lane start in the order of submission. `finished` may be called on any thread, all
// other functions only on one thread. Each task is finished, then waited for.
class Lanes {
 public:
  static double now();

  // Returns the lane's number, counted from 0.
  int64_t add_lane(std::string name);
  // Returns the task's sequence number.
  int64_t submit(int64_t lane, std::string name, int64_t bytes);
  void finished(int64_t lane, int64_t sequence);
  // The program waited for the task from `waited_from` until now, and is done with it.
  void retire(int64_t lane, int64_t sequence, double waited_from);
  // Finishes and retires a task whose times the host could not see, once they are known. Call it in
  // the order of sequence numbers.
  void retire_measured(int64_t lane, int64_t sequence, const Times& times);

  LaneTotals totals(int64_t lane) const;
  // While recording, retired tasks are kept until the caller takes them.
  void record(bool on);
  std::vector<Task> take_records(int64_t lane);

 private:
  struct Lane {
    LaneTotals totals;
    std::deque<Task> open;  // in the order of submission
    std::vector<Task> records;
    int64_t next_sequence = 0;
    double last_finished = -1;
  };
  static void finish(Lane& lane, Task& task);
  void count(Lane& lane, std::deque<Task>::iterator task);
  std::deque<Task>::iterator find(int64_t lane, int64_t sequence);

  mutable std::mutex mutex_;
  std::vector<Lane> lanes_;
  bool recording_ = false;
};

}  // namespace axonn::orchestrator
