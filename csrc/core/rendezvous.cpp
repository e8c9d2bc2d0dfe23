#include "core/rendezvous.h"

#include <exception>

#include "core/errors.h"

namespace axonn::comm {

Rendezvous::Rendezvous(const std::string& name, int64_t rank, int64_t size, KeyValueStore& store)
    : name_(name), prefix_("axonn/" + name + "/"), rank_(rank), size_(size), store_(store) {
  prefix_ += std::to_string(store.add(prefix_ + "count/" + std::to_string(rank), 1)) + "/";
}

std::vector<std::string> Rendezvous::exchange(const std::string& what, const std::string& value) {
  store_.set(key(what, rank_), value);
  std::vector<std::string> values;
  for (int64_t peer = 0; peer < size_; ++peer) values.push_back(get(what, peer));
  return values;
}

std::string Rendezvous::key(const std::string& what, int64_t rank) const {
  return prefix_ + what + "/" + std::to_string(rank);
}

std::string Rendezvous::get(const std::string& what, int64_t peer) {
  try {
    return store_.get(key(what, peer));
  } catch (const std::exception& error) {
    throw CommunicationError("rendezvous of group " + name_ + ": rank " + std::to_string(rank_) +
                             " found no " + what + " of rank " + std::to_string(peer) + ": " +
                             error.what());
  }
}

}  // namespace axonn::comm
