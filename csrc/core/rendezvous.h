// How the ranks of a group tell each other who and where they are, through a store.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/key_value_store.h"

namespace axonn::comm {

// The part of the store that one rendezvous uses: a name may be used again after its process group
// was destroyed, so each rendezvous counts itself.
class Rendezvous {
 public:
  Rendezvous(const std::string& name, int64_t rank, int64_t size, KeyValueStore& store);

  // Every rank's value of `what`, by rank. Collective.
  // Throws CommunicationError if a rank does not arrive within the store's timeout.
  std::vector<std::string> exchange(const std::string& what, const std::string& value);

 private:
  std::string key(const std::string& what, int64_t rank) const;
  std::string get(const std::string& what, int64_t peer);

  std::string name_, prefix_;
  int64_t rank_, size_;
  KeyValueStore& store_;
};

}  // namespace axonn::comm
