// One-way messages between two processes of a host. The receiver reads a message in the place where
// the sender wrote it.
//
// Both sides map one segment, which the sender creates. A block belongs to the sender until its
// message is posted, and then to the receiver until it releases the message, in any order. So
// neither side waits for the other, except the receiver for the next message.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/ranks/own_process.h"
#include "core/symmetric/bounded_wait.h"
#include "core/symmetric/epoch_flag.h"
#include "core/symmetric/shared_segment.h"

namespace axonn::comm {

// Maximum number of blocks of a channel, and thus of messages that are not yet released.
inline constexpr int64_t kMostBlocks = 1 << 14;

struct MessageRing;  // the beginning of the segment

class MessageReceiver;

// The sending side. One thread at a time may use it.
class MessageSender {
 public:
  // `address_space` limits the total size of messages that are not yet released. Memory is
  // allocated only when messages are written, and blocks are reused. Throws std::system_error.
  MessageSender(const std::string& name, int64_t address_space);
  // The receiver can still receive messages that were posted.
  ~MessageSender();
  MessageSender(const MessageSender&) = delete;
  MessageSender& operator=(const MessageSender&) = delete;

  // Returns the text that the receiver needs to open the channel.
  std::string address() const;
  // The receiver has opened the channel: the descriptor is no longer needed.
  void close_descriptor() { segment_->close_descriptor(); }
  // Returns the receiver for another thread of this process. It uses the same mapping, so that a
  // thread sanitizer sees both sides of every access.
  std::unique_ptr<MessageReceiver> receiver_in_this_process() const;

  // Returns where to write the next message. Throws CommunicationError if there is no room.
  std::byte* begin(int64_t bytes);
  // Sends the bytes written since `begin`.
  void post();
  // Returns the bytes of memory that messages have taken so far; later messages reuse them.
  int64_t num_bytes() const { return num_bytes_; }

 private:
  struct Block {
    int64_t index;
    int64_t offset;
    int64_t capacity;  // a power of two
    int64_t written;   // the most bytes that one message has written, in whole pages
    Epoch message;     // the last message in this block
  };

  MessageRing& ring() const;
  void reclaim();
  Block take(int64_t bytes);

  std::shared_ptr<SharedSegment> segment_;
  OwnProcess process_;
  std::map<int64_t, std::vector<Block>> free_;  // by capacity
  std::vector<Block> used_;                     // of messages that may still be unreleased
  int64_t num_blocks_ = 0;
  int64_t end_;  // end of all blocks
  std::atomic<int64_t> num_bytes_ = 0;
  std::optional<Block> next_;  // of a message that is not posted yet
  int64_t next_bytes_ = 0;
  Epoch posted_ = 0;
};

struct ReceivedMessage {
  std::byte* data;
  int64_t bytes;
  Epoch number;
  int64_t block;
};

// The receiving side. One thread at a time may receive; any thread may release and stop.
class MessageReceiver {
 public:
  // Throws std::system_error or CommunicationError if the two processes cannot share memory.
  explicit MessageReceiver(const std::string& address);
  MessageReceiver(std::shared_ptr<SharedSegment> segment, std::optional<pid_t> sender);
  MessageReceiver(const MessageReceiver&) = delete;
  MessageReceiver& operator=(const MessageReceiver&) = delete;

  // Returns the next message, or nullopt after this time or when stopped. Throws CommunicationError
  // if there is no message and the sender has left or died.
  std::optional<ReceivedMessage> receive(std::chrono::duration<double> timeout);
  // Returns a message's memory to the sender. Does nothing in a fork of the process.
  void release(const ReceivedMessage& message);
  // Ends all waits, now and later.
  void stop();

 private:
  MessageRing& ring() const;

  std::shared_ptr<SharedSegment> segment_;
  OwnProcess process_;
  std::optional<ProcessWatch> sender_;
  Crowding crowding_;
  Epoch received_ = 0;
  std::atomic<bool> stopped_ = false;
};

}  // namespace axonn::comm
