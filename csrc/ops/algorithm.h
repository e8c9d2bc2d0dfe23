// The algorithms by which an op can combine its collective with its matmul.
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

// The algorithm that a caller asks for; kAuto picks the one known to be fastest (tuning/tuner.h).
using AskedAlgorithm = std::optional<Algorithm>;
inline constexpr AskedAlgorithm kAuto = std::nullopt;

}  // namespace axonn::ops
