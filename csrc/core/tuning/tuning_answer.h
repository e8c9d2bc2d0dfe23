// What rank 0 of a group tells the others about a call that can be made in several ways.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace axonn::tuning {

struct Answer {
  enum class Verdict { kDefault, kDisk, kMeasure };

  std::string asked;       // the signature that rank 0 is asked about
  std::string kept_under;  // with what rank 0 adds to it for the disk
  Verdict verdict;
  std::string algorithm;  // the choice; to measure: what is preferred
  // To measure: all there are, by rank 0's operands. Every rank takes these, in this order.
  std::vector<std::string> candidates;
  std::vector<std::pair<std::string, double>> median_us;
};

// Signatures must not have line breaks, nor names spaces.
std::string encode(const Answer& answer);
// Throws std::invalid_argument for anything else.
Answer decode_answer(const std::string& text);

}  // namespace axonn::tuning
