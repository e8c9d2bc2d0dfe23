// Rank 0's answer to the other ranks of a group, about a call that can be made in several ways.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace axonn::tuning {

struct Answer {
  enum class Verdict { kDefault, kDisk, kMeasure };

  std::string asked;       // the signature that rank 0 is asked about
  std::string kept_under;  // the key on disk: `asked`, plus what rank 0 adds to it
  Verdict verdict;
  std::string algorithm;  // the choice; if it has to be measured, the preferred candidate
  // If the choice has to be measured: all candidates for rank 0's operands. Every rank measures
  // them, in this order.
  std::vector<std::string> candidates;
  std::vector<std::pair<std::string, double>> median_us;
};

// A signature must not contain line breaks, and a name must not contain spaces.
std::string encode(const Answer& answer);
// Throws std::invalid_argument for a text that encode() does not produce.
Answer decode_answer(const std::string& text);

}  // namespace axonn::tuning
