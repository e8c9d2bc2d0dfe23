// The errors that the core throws; csrc/ops passes them on to Python as RuntimeError.
#pragma once

#include <cerrno>
#include <cstdint>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>

namespace axonn::comm {

// A peer did not do its part: it died, failed, is late, or called another op.
class CommunicationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// No rank of the group can make this call; this was found before any part of it was made. The
// group's other calls are not affected.
class CallRefused : public CommunicationError {
 public:
  using CommunicationError::CommunicationError;
};

// Returns the error of a call on a group that an earlier call has broken.
inline CommunicationError group_is_broken(const std::string& op, const std::string& group,
                                          int64_t rank) {
  return CommunicationError(op + ": group " + group +
                            " cannot be used any more: an earlier call failed on rank " +
                            std::to_string(rank));
}

// Returns the beginning of the message about a wait that fails; the reason why the peer does not
// come follows it.
inline std::string waited_for(const std::string& op, int64_t rank, int64_t peer,
                              const std::string& group) {
  return op + ": rank " + std::to_string(rank) + " waited for rank " + std::to_string(peer) +
         " of group " + group + ", which ";
}

// Returns `theirs`, with this rank's value after each value that differs, as in
// "op x=float32[4,16] (here x=float32[6,16]) dim=0". Values have the form name=value; values that
// only one of the calls has are marked as such.
inline std::string described_next_to(const std::string& theirs, const std::string& own) {
  const auto values_of = [](const std::string& call) {
    std::map<std::string, std::string> values;
    std::istringstream words(call);
    for (std::string word; words >> word;) values[word.substr(0, word.find('='))] = word;
    return values;
  };
  auto here = values_of(own);
  std::istringstream words(theirs);
  std::string word, text;
  words >> text;
  if (!here.contains(text)) return theirs;  // another op
  while (words >> word) {
    const auto found = here.extract(word.substr(0, word.find('=')));
    text += ' ' + word;
    if (found.empty()) {
      text += " (not here)";
    } else if (found.mapped() != word) {
      text += " (here " + found.mapped() + ")";
    }
  }
  here.erase(text.substr(0, text.find(' ')));
  for (const auto& [name, value] : here) text += " (here also " + value + ")";
  return text;
}

// Follows waited_for() if the peer has made a different call than this rank, whose call is `own`.
inline std::string called_instead(const std::string& theirs, const std::string& own) {
  return "called " + described_next_to(theirs, own) +
         " instead: all ranks of a group must make the same calls, in the same order, with equal "
         "shapes, dtypes, options, algorithms and requires_grad";
}

// Ends a message about something that has not come, or is not done, within the user's time limit.
inline std::string after_timeout(double seconds) {
  std::ostringstream text;  // a stream omits the trailing zeros of std::to_string
  text << "after " << seconds << " s (AXONN_TIMEOUT_SECONDS)";
  return text.str();
}

// Returns the error that reports a store's error; `where` names the op or the group, and the rank.
inline CommunicationError lost_store(const std::string& where, const std::exception& error) {
  return CommunicationError(
      where + " lost the c10d store, which a rank that ends may take along: " + error.what());
}

// Throws the error of a system call that failed; the message carries errno's text.
[[noreturn]] inline void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace axonn::comm
