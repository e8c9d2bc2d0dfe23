// A KeyValueStore for ranks that are threads or forked processes of the test: a table in memory
// that children of a fork share. Create it before the ranks.
#pragma once

#include <pthread.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/ranks/key_value_store.h"

namespace axonn::comm::testing {

class InMemoryStore : public KeyValueStore {
 public:
  using Seconds = std::chrono::duration<double>;

  explicit InMemoryStore(Seconds timeout = std::chrono::seconds(300)) : timeout_(timeout) {
    void* memory =
        mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no memory for the store");
    table_ = static_cast<Table*>(memory);
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&table_->mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
  }
  ~InMemoryStore() override { munmap(table_, sizeof(Table)); }
  InMemoryStore(const InMemoryStore&) = delete;
  InMemoryStore& operator=(const InMemoryStore&) = delete;

  void set(const std::string& key, const std::string& value) override {
    const Lock lock(table_);
    table_->write(key, value);
  }

  std::string get(const std::string& key) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    while (true) {
      {
        const Lock lock(table_);
        if (const Entry* entry = table_->find(key)) return entry->text();
      }
      if (std::chrono::steady_clock::now() > deadline) {
        throw std::runtime_error("timed out waiting for key " + key);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  bool has(const std::string& key) override {
    const Lock lock(table_);
    return table_->find(key) != nullptr;
  }

  int64_t add(const std::string& key, int64_t amount) override {
    const Lock lock(table_);
    const Entry* entry = table_->find(key);
    const int64_t sum = (entry == nullptr ? 0 : std::stoll(entry->text())) + amount;
    table_->write(key, std::to_string(sum));
    return sum;
  }

 private:
  static constexpr int64_t kCapacity = 256;

  struct Entry {
    char key[96];
    char value[416];
    size_t size;

    std::string text() const { return {value, size}; }
  };

  struct Table {
    pthread_mutex_t mutex;
    int64_t count;
    Entry entries[kCapacity];

    Entry* find(const std::string& key) {
      for (int64_t i = 0; i < count; ++i) {
        if (key == entries[i].key) return &entries[i];
      }
      return nullptr;
    }
    void write(const std::string& key, const std::string& value) {
      Entry* entry = find(key);
      if (entry == nullptr) {
        if (count == kCapacity || key.size() >= sizeof(Entry::key)) {
          throw std::runtime_error("no room in the store for key " + key);
        }
        entry = &entries[count++];
        std::memcpy(entry->key, key.c_str(), key.size() + 1);
      }
      if (value.size() > sizeof(Entry::value)) throw std::runtime_error("value too long: " + value);
      std::memcpy(entry->value, value.data(), value.size());
      entry->size = value.size();
    }
  };

  class Lock {
   public:
    explicit Lock(Table* table) : table_(table) { pthread_mutex_lock(&table_->mutex); }
    ~Lock() { pthread_mutex_unlock(&table_->mutex); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    Table* table_;
  };

  Seconds timeout_;
  Table* table_ = nullptr;
};

}  // namespace axonn::comm::testing
