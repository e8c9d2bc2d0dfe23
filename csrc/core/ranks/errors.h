// What the core throws; csrc/ops hands it on to Python as RuntimeError.
#pragma once

#include <cerrno>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>

namespace axonn::comm {

// A peer did not do its part: it died, failed, is late, or called something else.
class CommunicationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A call that no rank of its group can make, found out before any of it was made: the group's other
// calls are as they were.
class CallRefused : public CommunicationError {
 public:
  using CommunicationError::CommunicationError;
};

// What a call on a group that an earlier one has broken is told.
inline CommunicationError group_is_broken(const std::string& op, const std::string& group,
                                          int64_t rank) {
  return CommunicationError(op + ": group " + group +
                            " cannot be used any more: an earlier call failed on rank " +
                            std::to_string(rank));
}

// Begins what is said of a rank that waits in vain; what keeps the peer from coming follows.
inline std::string waited_for(const std::string& op, int64_t rank, int64_t peer,
                              const std::string& group) {
  return op + ": rank " + std::to_string(rank) + " waited for rank " + std::to_string(peer) +
         " of group " + group + ", which ";
}

// What a rank is told whose peer has made another call, after waited_for().
inline std::string called_instead(const std::string& theirs) {
  return "called " + theirs +
         " instead: all ranks of a group must make the same calls, in the same order, with equal "
         "shapes, dtypes, options, algorithms and requires_grad";
}

// Ends what is said of whatever has not come, or is not done, within the limit that the user set.
inline std::string after_timeout(double seconds) {
  std::ostringstream text;  // without the zeros of std::to_string
  text << "after " << seconds << " s (AXONN_TIMEOUT_SECONDS)";
  return text.str();
}

// What a store's error is reported as; `where` names the op or the group, and the rank.
inline CommunicationError lost_store(const std::string& where, const std::exception& error) {
  return CommunicationError(
      where + " lost the c10d store, which a rank that ends may take along: " + error.what());
}

// A system call failed; the message carries errno's text.
[[noreturn]] inline void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace axonn::comm
