#include "core/ranks/waits.h"

#include <mutex>
#include <utility>

namespace axonn::comm {
namespace {

struct Table {
  std::mutex mutex;
  std::list<Wait> waits;
};

// Never destroyed, because threads may still wait while the process ends.
Table& table() {
  static Table* const only = new Table;
  return *only;
}

}  // namespace

NotedWait::NotedWait(Wait wait) {
  const std::lock_guard lock(table().mutex);
  place_ = table().waits.insert(table().waits.end(), std::move(wait));
}

NotedWait::~NotedWait() {
  const std::lock_guard lock(table().mutex);
  table().waits.erase(place_);
}

std::vector<Wait> waits_under_way() {
  const std::lock_guard lock(table().mutex);
  return {table().waits.begin(), table().waits.end()};
}

std::vector<int64_t> all_but(int64_t rank, int64_t size) {
  std::vector<int64_t> others;
  for (int64_t other = 0; other < size; ++other) {
    if (other != rank) others.push_back(other);
  }
  return others;
}

}  // namespace axonn::comm
