#include "core/symmetric/message_channel.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "symmetric/ranks.h"

namespace axonn::comm {
namespace {

using testing::error_of;
using testing::expect_contains;
using testing::expect_success;
using testing::fork_child;
using testing::run_threads;
using testing::SharedArray;
using testing::Timer;

constexpr int64_t kSpace = int64_t{1} << 26;
constexpr auto kLong = testing::kHang;
constexpr auto kAtOnce = std::chrono::milliseconds(1);

// A message of random length; its number determines its bytes.
std::vector<uint8_t> message(uint32_t number) {
  std::mt19937 random(number);
  std::vector<uint8_t> bytes(random() % 20000);
  for (auto& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

void send(MessageSender& sender, const std::vector<uint8_t>& bytes) {
  std::byte* to = sender.begin(static_cast<int64_t>(bytes.size()));
  if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
  sender.post();
}

// Holds up to ten messages, and releases them in random order after checking each.
void receive_all(MessageReceiver& receiver, uint32_t count) {
  std::mt19937 random(7);
  std::vector<ReceivedMessage> held;
  for (uint32_t number = 0; number < count || !held.empty();) {
    if (number < count && (held.empty() || (held.size() < 10 && random() % 2 == 0))) {
      const auto received = receiver.receive(kLong);
      ASSERT_TRUE(received);
      ASSERT_EQ(received->number, number++);
      held.push_back(*received);
      continue;
    }
    const auto index = static_cast<int64_t>(random() % held.size());
    const ReceivedMessage chosen = held[static_cast<size_t>(index)];
    const auto expected = message(chosen.number);
    ASSERT_EQ(static_cast<size_t>(chosen.bytes), expected.size());
    ASSERT_TRUE(
        std::equal(expected.begin(), expected.end(), reinterpret_cast<uint8_t*>(chosen.data)));
    std::fill_n(chosen.data, chosen.bytes, std::byte{0xee});  // the receiver may also write
    receiver.release(chosen);
    held.erase(held.begin() + index);
  }
}

TEST(MessageChannel, ThreadsGetMessagesInOrderAndUseBlocksAgain) {
  MessageSender sender("test", kSpace);
  const auto receiver = sender.receiver_in_this_process();
  expect_success(run_threads(2, [&](int64_t rank) {
    if (rank == 1) return receive_all(*receiver, 2000);
    for (uint32_t number = 0; number < 2000; ++number) send(sender, message(number));
  }));
  // In the worst case, all were posted before any was released.
  EXPECT_LE(sender.num_bytes(), kSpace);
  const int64_t before = sender.num_bytes();
  for (uint32_t number = 2000; number < 2100; ++number) {
    send(sender, std::vector<uint8_t>(4096));
    receiver->release(*receiver->receive(kLong));
  }
  EXPECT_LE(sender.num_bytes(), before + 4096);
}

TEST(MessageChannel, ProcessesGetMessages) {
  MessageSender sender("test", kSpace);
  const pid_t child = fork_child([address = sender.address()] {
    MessageReceiver receiver(address);
    receive_all(receiver, 2000);
  });
  for (uint32_t number = 0; number < 2000; ++number) send(sender, message(number));
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(MessageChannel, WhatWasPostedComesAlsoFromASenderThatHasLeft) {
  auto sender = std::make_unique<MessageSender>("test", kSpace);
  const auto receiver = sender->receiver_in_this_process();
  send(*sender, message(0));
  sender.reset();
  ASSERT_TRUE(receiver->receive(kLong));
  expect_contains(error_of([&] { receiver->receive(kLong); }), {"the sender has left"});
}

TEST(MessageChannel, AKilledSenderIsNoticed) {
  const SharedArray<char> address(4096);
  const SharedArray<std::atomic<bool>> is_there(1);
  const pid_t child = fork_child([&] {
    const MessageSender sender("test", kSpace);
    std::strcpy(&address[0], sender.address().c_str());
    is_there[0] = true;
    pause();
  });
  while (!is_there[0]) std::this_thread::sleep_for(kAtOnce);
  MessageReceiver receiver(&address[0]);
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    kill(child, SIGKILL);
  });
  expect_contains(error_of([&] { receiver.receive(kLong); }), {"has ended"});
  killer.join();
  waitpid(child, nullptr, 0);
}

TEST(MessageChannel, WaitingEndsByItsTimeAndWhenStopped) {
  MessageSender sender("test", kSpace);
  const auto receiver = sender.receiver_in_this_process();
  const Timer timer;
  EXPECT_FALSE(receiver->receive(std::chrono::milliseconds(30)));
  EXPECT_GE(timer.seconds(), 0.03);
  std::thread stopper([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    receiver->stop();
  });
  EXPECT_FALSE(receiver->receive(kLong));
  EXPECT_LT(timer.seconds(), testing::kHang.count());
  stopper.join();
}

TEST(MessageChannel, SaysWhenThereIsNoRoom) {
  MessageSender sender("test", 1 << 16);
  const auto receiver = sender.receiver_in_this_process();
  for (int i = 0; i < 2; ++i) send(sender, std::vector<uint8_t>(1 << 15));
  expect_contains(error_of([&] { send(sender, std::vector<uint8_t>(1 << 15)); }),
                  {"32768 bytes", "2 messages", "65536 bytes (AXONN_SYMMETRIC_MEMORY_BYTES)"});
  receiver->release(*receiver->receive(kLong));
  send(sender, std::vector<uint8_t>(1 << 15));  // now there is room
}

TEST(MessageChannel, HoldsAsManyMessagesAsItSays) {
  MessageSender sender("test", kMostBlocks << 13);
  const auto receiver = sender.receiver_in_this_process();
  // The messages have two sizes, so that no size takes all blocks.
  for (int64_t n = 0; n < kMostBlocks; ++n) send(sender, std::vector<uint8_t>(n % 2 ? 5000 : 1));
  expect_contains(error_of([&] { send(sender, {}); }), {"16384 messages", "at most 16384"});
  std::vector<ReceivedMessage> received;
  for (Epoch number = 0; number < kMostBlocks; ++number) {
    received.push_back(*receiver->receive(kLong));
    ASSERT_EQ(received.back().number, number);
    ASSERT_EQ(received.back().bytes, number % 2 ? 5000 : 1);
  }
  receiver->release(received[78]);
  send(sender, {});
  EXPECT_EQ(receiver->receive(kLong)->number, kMostBlocks);
}

TEST(MessageChannel, AMessageThatIsHeldForLongCostsNoMemory) {
  MessageSender sender("test", kSpace);
  const auto receiver = sender.receiver_in_this_process();
  send(sender, {1});
  for (int round = 0; round < 3; ++round) {
    const auto held = *receiver->receive(kLong);
    for (int64_t n = 0; n < kMostBlocks; ++n) {
      send(sender, {1});
      receiver->release(*receiver->receive(kLong));
    }
    send(sender, {1});  // the next one to be held
    receiver->release(held);
  }
  EXPECT_EQ(sender.num_bytes(), 2 * 4096);
}

TEST(MessageChannel, AMessageThatIsNotPostedCostsNoMemory) {
  MessageSender sender("test", 1 << 12);
  const auto receiver = sender.receiver_in_this_process();
  sender.begin(10);
  send(sender, {3});
  EXPECT_EQ(*receiver->receive(kLong)->data, std::byte{3});
}

TEST(MessageChannel, AForkReleasesNothing) {
  MessageSender sender("test", 1 << 12);
  const auto receiver = sender.receiver_in_this_process();
  send(sender, {9});
  const auto received = *receiver->receive(kLong);
  const pid_t child = fork_child([&] { receiver->release(received); });
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_NE(error_of([&] { send(sender, {1}); }), "");
  receiver->release(received);
  send(sender, {1});
}

}  // namespace
}  // namespace axonn::comm
