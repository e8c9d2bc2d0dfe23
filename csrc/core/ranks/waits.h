// What this process waits for at the moment: a table for reports about jobs that hang. Waits inside
// calls are entered once they have lasted a while, so that the table costs short ones nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <string>
#include <vector>

namespace axonn::comm {

using WaitClock = std::chrono::steady_clock;

// After this time a wait inside a call is entered.
inline constexpr auto kNotedAfter = std::chrono::milliseconds(100);

struct Wait {
  std::string group;           // its c10d name
  std::string axis;            // the name that messages use for the group
  std::string call;            // for people: the op, and what the ranks compare of it
  int64_t number;              // of the call in the group, equal on all ranks; 0: it has none
  std::vector<int64_t> peers;  // the ranks of the group that it waits for
  std::string what;            // completes a sentence that begins with these ranks
  WaitClock::time_point since;
};

// Keeps a wait in the table for as long as this object lives. Any thread may make one.
class NotedWait {
 public:
  explicit NotedWait(Wait wait);
  ~NotedWait();
  NotedWait(const NotedWait&) = delete;
  NotedWait& operator=(const NotedWait&) = delete;

 private:
  std::list<Wait>::iterator place_;
};

// Returns the waits that are in the table now, in the order in which they were entered.
std::vector<Wait> waits_under_way();

// Returns the ranks of a group but one, for a wait that cannot tell whom it waits for.
std::vector<int64_t> all_but(int64_t rank, int64_t size);

}  // namespace axonn::comm
