// How an op combines a collective with its product, and which algorithms it may be asked for.
#pragma once

#include <array>
#include <optional>

namespace axonn::ops {

enum class Algorithm { kFused, kChunked, kSequential };

inline constexpr std::array kAlgorithms{Algorithm::kFused, Algorithm::kChunked,
                                        Algorithm::kSequential};

constexpr const char* name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kFused:
      return "fused";
    case Algorithm::kChunked:
      return "chunked";
    case Algorithm::kSequential:
      return "sequential";
  }
  return "";
}

// One algorithm, or kAuto, which stands for the one that is known to be fastest (tuning/tuner.h).
using AskedAlgorithm = std::optional<Algorithm>;
inline constexpr AskedAlgorithm kAuto = std::nullopt;

}  // namespace axonn::ops
