#include "core/tuning/tuning_answer.h"

#include <array>
#include <limits>
#include <sstream>
#include <stdexcept>

namespace axonn::tuning {
namespace {

using Verdict = Answer::Verdict;

constexpr std::array kVerdicts{std::pair{Verdict::kDefault, "default"},
                               std::pair{Verdict::kDisk, "disk"},
                               std::pair{Verdict::kMeasure, "measure"}};

Verdict verdict_named(const std::string& text) {
  for (const auto& [verdict, name] : kVerdicts) {
    if (text == name) return verdict;
  }
  throw std::invalid_argument("no verdict: " + text);
}

}  // namespace

std::string encode(const Answer& answer) {
  std::ostringstream out;
  out.precision(std::numeric_limits<double>::max_digits10);
  out << answer.asked << '\n' << answer.kept_under << '\n';
  for (const auto& [verdict, name] : kVerdicts) {
    if (verdict == answer.verdict) out << name;
  }
  out << '\n' << answer.algorithm << '\n';
  for (const auto& name : answer.candidates) out << name << ' ';
  out << '\n';
  for (const auto& [name, median] : answer.median_us) out << name << ' ' << median << ' ';
  out << '\n';
  return out.str();
}

Answer decode_answer(const std::string& text) {
  std::istringstream in(text);
  std::string verdict, names, medians, name;
  Answer answer{};
  for (auto* line :
       {&answer.asked, &answer.kept_under, &verdict, &answer.algorithm, &names, &medians}) {
    if (!std::getline(in, *line)) throw std::invalid_argument("an answer cut short: " + text);
  }
  answer.verdict = verdict_named(verdict);
  std::istringstream candidates(names);
  while (candidates >> name) answer.candidates.push_back(name);
  std::istringstream measured(medians);
  for (double median = 0; measured >> name >> median;) answer.median_us.emplace_back(name, median);
  return answer;
}

}  // namespace axonn::tuning
