#include "core/symmetric/message_channel.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <sstream>
#include <utility>

#include "core/ranks/errors.h"
#include "core/symmetric/futex.h"

namespace axonn::comm {

// All zeros, as in a new segment, are a valid new ring. A message's `offset`, `bytes` and `block`
// are written before it is posted. Every message that has not been received has its own block, so
// its entry is not reused before then.
struct MessageRing {
  struct Entry {
    int64_t offset;
    int64_t bytes;
    int64_t block;
  };

  EpochFlag posted;
  SharedWord sender_left;
  SharedWord receiver_sleeps;
  Entry entries[kMostBlocks];                // by message number, modulo kMostBlocks
  std::atomic<Epoch> released[kMostBlocks];  // by block: number of the released message, plus one
};

namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kRingBytes = (sizeof(MessageRing) + kPageBytes - 1) / kPageBytes * kPageBytes;

MessageRing& ring_of(const SharedSegment& segment) {
  return *reinterpret_cast<MessageRing*>(segment.data());
}

}  // namespace

MessageSender::MessageSender(const std::string& name, int64_t address_space)
    : segment_(std::make_shared<SharedSegment>(
          SharedSegment::create("axonn:" + name, kRingBytes + address_space))),
      end_(kRingBytes) {}

MessageSender::~MessageSender() {
  if (!process_.is_this()) return;
  ring().sender_left.value.store(1);
  futex_wake(ring().posted.value);
}

MessageRing& MessageSender::ring() const { return ring_of(*segment_); }

std::string MessageSender::address() const {
  std::ostringstream out;
  out << getpid() << ' ' << segment_->fd() << ' ' << segment_->nonce() << ' ' << segment_->size()
      << ' ' << host_identity();
  return out.str();
}

std::unique_ptr<MessageReceiver> MessageSender::receiver_in_this_process() const {
  return std::make_unique<MessageReceiver>(segment_, std::nullopt);
}

void MessageSender::reclaim() {
  std::erase_if(used_, [&](const Block& block) {
    const auto& released = ring().released[block.index];
    if (released.load(std::memory_order_acquire) != block.message + 1) return false;
    free_[block.capacity].push_back(block);
    return true;
  });
}

// Block sizes are powers of two, so that messages of changing sizes reuse the same blocks.
MessageSender::Block MessageSender::take(int64_t bytes) {
  const auto least = static_cast<uint64_t>(std::max(bytes, kPageBytes));
  const auto capacity = static_cast<int64_t>(std::bit_ceil(least));
  auto& blocks = free_[capacity];
  if (blocks.empty()) reclaim();
  if (!blocks.empty()) {
    const Block block = blocks.back();
    blocks.pop_back();
    return block;
  }
  if (capacity > segment_->size() - end_ || num_blocks_ == kMostBlocks) {
    std::ostringstream text;
    text << "a message of " << bytes << " bytes finds no room: " << used_.size()
         << " messages before it are still used, and of " << segment_->size() - kRingBytes
         << " bytes (AXONN_SYMMETRIC_MEMORY_BYTES) " << end_ - kRingBytes << " are taken, in "
         << num_blocks_ << " blocks of at most " << kMostBlocks;
    throw CommunicationError(text.str());
  }
  end_ += capacity;
  return {num_blocks_++, end_ - capacity, capacity, 0, 0};
}

std::byte* MessageSender::begin(int64_t bytes) {
  if (!process_.is_this()) throw CommunicationError("a fork of the process cannot send messages");
  if (next_) free_[next_->capacity].push_back(*next_);
  next_.reset();
  next_ = take(bytes);
  next_bytes_ = bytes;
  const int64_t pages = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  num_bytes_ += std::max<int64_t>(pages - next_->written, 0);
  next_->written = std::max(next_->written, pages);
  return segment_->data() + next_->offset;
}

// The receiver announces that it sleeps and then checks `posted` once more; this function raises
// `posted` and then checks the announcement. All four steps are sequentially consistent, so at
// least one side sees the other.
void MessageSender::post() {
  next_->message = posted_;
  ring().entries[posted_ % kMostBlocks] = {next_->offset, next_bytes_, next_->index};
  used_.push_back(*next_);
  next_.reset();
  ring().posted.raise_to(++posted_);
  if (ring().receiver_sleeps.value.load() != 0) futex_wake(ring().posted.value);
}

MessageReceiver::MessageReceiver(std::shared_ptr<SharedSegment> segment, std::optional<pid_t> pid)
    : segment_(std::move(segment)) {
  if (pid) sender_.emplace(*pid);
}

MessageReceiver::MessageReceiver(const std::string& address) {
  std::istringstream in(address);
  pid_t pid;
  int fd;
  uint64_t nonce;
  int64_t bytes;
  std::string host;
  in >> pid >> fd >> nonce >> bytes;
  in.ignore(1);
  std::getline(in, host);
  if (host != host_identity()) throw CommunicationError("the sender is on another host");
  if (pid != getpid()) sender_.emplace(pid);
  segment_ = std::make_shared<SharedSegment>(
      SharedSegment::open(pid, fd, nonce, bytes, SharedSegment::Access::kWrite));
}

MessageRing& MessageReceiver::ring() const { return ring_of(*segment_); }

std::optional<ReceivedMessage> MessageReceiver::receive(std::chrono::duration<double> timeout) {
  auto& posted = ring().posted;
  const Epoch next = received_ + 1;
  bool gave_up = false;
  std::string obstacle;
  const auto done = [&] { return posted.reached(next) || gave_up; };
  const auto sleep = [&](std::chrono::nanoseconds time) {
    ring().receiver_sleeps.value.store(1);
    const Epoch value = posted.value.load(std::memory_order_seq_cst);
    if (!epoch_reached(value, next)) futex_wait(posted.value, value, time);
    ring().receiver_sleeps.value.store(0);
  };
  const auto check = [&](std::chrono::duration<double> elapsed) {
    // Messages that were posted before the sender left can still be received.
    const bool left = ring().sender_left.value.load() != 0;
    if (left) obstacle = "the sender has left";
    if (!left && sender_ && !sender_->alive()) obstacle = "the process of the sender has ended";
    gave_up = !obstacle.empty() || elapsed > timeout || stopped_;
  };
  bounded_wait(done, sleep, check, crowding_);
  if (!posted.reached(next)) {
    if (obstacle.empty()) return std::nullopt;
    throw CommunicationError(obstacle);
  }
  const auto& [offset, bytes, block] = ring().entries[received_ % kMostBlocks];
  return ReceivedMessage{segment_->data() + offset, bytes, received_++, block};
}

void MessageReceiver::release(const ReceivedMessage& message) {
  if (!process_.is_this()) return;
  ring().released[message.block].store(message.number + 1, std::memory_order_release);
}

void MessageReceiver::stop() {
  stopped_ = true;
  futex_wake(ring().posted.value);
}

}  // namespace axonn::comm
