// The current waits of this process: a table for reports about jobs that hang. Waits inside calls
// are entered only after a while, so that the table costs short waits nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <string>
#include <vector>

namespace axonn::comm {

using WaitClock = std::chrono::steady_clock;

// A wait inside a call is entered after this time.
inline constexpr auto kNotedAfter = std::chrono::milliseconds(100);

struct Wait {
  std::string group;           // its c10d name
  std::string axis;            // the name that messages use for the group
  std::string call;            // for display: the op, and the values that ranks compare
  int64_t number;              // of the call in the group, equal on all ranks; 0: none
  std::vector<int64_t> peers;  // the ranks of the group that it waits for
  std::string what;            // completes a sentence that begins with these ranks
  WaitClock::time_point since;
};

// Keeps a wait in the table for as long as this object lives. Any thread may create one.
class NotedWait {
 public:
  explicit NotedWait(Wait wait);
  ~NotedWait();
  NotedWait(const NotedWait&) = delete;
  NotedWait& operator=(const NotedWait&) = delete;

 private:
  std::list<Wait>::iterator place_;
};

// Returns the waits that are in the table now, in the order of entry.
std::vector<Wait> waits_under_way();

// Returns all ranks of a group but one, for a wait that cannot tell which ranks it waits for.
std::vector<int64_t> all_but(int64_t rank, int64_t size);

}  // namespace axonn::comm
