// Wraps c10d's store as the core's KeyValueStore.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "core/ranks/key_value_store.h"

namespace axonn::ops {

class C10dStore : public comm::KeyValueStore {
 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::string get(const std::string& key) override {
    const auto value = store_->get(key);
    return {value.begin(), value.end()};
  }
  bool has(const std::string& key) override { return store_->check({key}); }
  int64_t add(const std::string& key, int64_t amount) override { return store_->add(key, amount); }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace axonn::ops
