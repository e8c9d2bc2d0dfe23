// Servers of one request at a time, and when each request is served.
#pragma once

#include <algorithm>

namespace axonn::times {

struct Interval {
  double begin;
  double end;
};

// One direction of a link, a copy engine, or a host thread. Requests are served in the order in
// which they are made.
class Server {
 public:
  // Serves a request that is ready at `ready_us` and occupies the server for `for_us`.
  Interval serve(double ready_us, double for_us) {
    const double begin = std::max(ready_us, free_us_);
    free_us_ = begin + for_us;
    busy_us_ += for_us;
    return {begin, free_us_};
  }

  double free_us() const { return free_us_; }
  double busy_us() const { return busy_us_; }

 private:
  double free_us_ = 0;
  double busy_us_ = 0;
};

}  // namespace axonn::times
