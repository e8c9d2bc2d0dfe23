// The interface that a rendezvous needs from a store that all ranks can reach (c10d's store, or a
// map in the tests).
#pragma once

#include <cstdint>
#include <string>

namespace axonn::comm {

class KeyValueStore {
 public:
  virtual ~KeyValueStore() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;

  // Blocks until `key` is set. Throws if it is not set within the store's own timeout.
  virtual std::string get(const std::string& key) = 0;

  // Returns whether `key` is set, without waiting.
  virtual bool has(const std::string& key) = 0;

  // Adds to a counter that starts at 0 and returns the sum.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
};

}  // namespace axonn::comm
