// What the core throws; csrc/ops hands it on to Python as RuntimeError.
#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace axonn::comm {

// A peer did not do its part: it died, failed, is late, or called something else.
class CommunicationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A system call failed; the message carries errno's text.
[[noreturn]] inline void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace axonn::comm
