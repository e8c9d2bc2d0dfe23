#include "core/ranks/watchdog.h"

#include "core/ranks/errors.h"

namespace axonn::comm {

using Clock = std::chrono::steady_clock;

void WatchedCalls::add(int64_t sequence, const std::string& signature,
                       std::function<bool()> is_done) {
  const std::lock_guard lock(mutex_);
  calls_.push_back({sequence, signature, std::move(is_done), Clock::now()});
}

void WatchedCalls::poll(std::chrono::duration<double> timeout) {
  const std::lock_guard lock(mutex_);
  while (!calls_.empty() && calls_.front().is_done()) {
    log_->complete(calls_.front().sequence);
    calls_.pop_front();
    // A call's time starts only when the calls before it are done.
    if (!calls_.empty()) calls_.front().start = Clock::now();
  }
  if (calls_.empty()) return;
  const Call& call = calls_.front();
  const std::chrono::duration<double> elapsed = Clock::now() - call.start;
  if (elapsed > timeout) {
    log_->publish();
    throw CommunicationError(log_->explain_timeout(call.sequence, call.signature, elapsed.count()));
  }
}

Watchdog::Watchdog(WatchdogOptions options, KeyValueStore& store, std::function<void()> health,
                   std::function<void()> abort)
    : options_(std::move(options)),
      store_(store),
      health_(std::move(health)),
      abort_(std::move(abort)),
      thread_([this] { run(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Watchdog::watch(std::shared_ptr<WatchedCalls> calls) {
  const std::lock_guard lock(mutex_);
  calls_.push_back(std::move(calls));
}

void Watchdog::check() const {
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw CommunicationError(failure_);
}

void Watchdog::fail(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = why;
  }
  wake_.notify_all();
}

void Watchdog::run() {
  auto next_exchange = Clock::now();
  const auto interval = std::chrono::duration_cast<Clock::duration>(options_.store_interval);
  while (true) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, options_.poll_interval, [this] { return stop_; });
      if (stop_ && (failure_.empty() || told_)) return;
      if (stop_) {  // a failing rank often ends at once, but its peers must learn of it
        lock.unlock();
        return exchange();
      }
    }
    try {
      poll();
    } catch (const std::exception& error) {
      fail(error.what());
    }
    bool failed = false, told = false;
    {
      const std::lock_guard lock(mutex_);
      failed = !failure_.empty();
      told = told_;
    }
    if ((failed && !told) || Clock::now() >= next_exchange) {
      exchange();
      next_exchange = Clock::now() + interval;
    }
    if (failed && !aborted_) {
      aborted_ = true;
      abort_();
    }
  }
}

void Watchdog::poll() {
  std::vector<std::shared_ptr<WatchedCalls>> calls;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return;  // after a failure, aborted calls report nothing new
    calls = calls_;
  }
  check_health();
  for (const auto& one : calls) one->poll(options_.timeout);
}

void Watchdog::check_health() {
  try {
    health_();
  } catch (const std::exception& error) {
    const std::string why = reason(error.what());
    if (why != error.what()) throw CommunicationError(why);
    throw;
  }
}

// A rank reports its failure before it aborts its communicators, so a peer that notices the abort
// first finds the reason in the store.
std::string Watchdog::reason(const std::string& error) {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return failure_;
  }
  try {
    return store_.has(failure_key()) ? store_.get(failure_key()) : error;
  } catch (const std::exception&) {  // without the store, there is only the error
    return error;
  }
}

// Tells the peers this rank's progress and whether it has failed; learns whether a peer has
// failed.
void Watchdog::exchange() {
  const std::string key = failure_key();
  std::vector<std::shared_ptr<WatchedCalls>> calls;
  std::string failure;
  {
    const std::lock_guard lock(mutex_);
    calls = calls_;
    failure = failure_;
  }
  // A lost store is not a failure of a collective. If ranks are gone with it, their collectives
  // will be late.
  try {
    for (const auto& one : calls) one->log().publish();
    if (store_.has(key)) {
      if (failure.empty()) fail(store_.get(key));
    } else if (!failure.empty()) {
      store_.set(key, "rank " + std::to_string(options_.rank) + " reports: " + failure);
    }
    const std::lock_guard lock(mutex_);
    told_ = told_ || !failure.empty();
  } catch (const std::exception&) {
    const std::lock_guard lock(mutex_);
    told_ = told_ || !failure.empty();
  }
}

}  // namespace axonn::comm
