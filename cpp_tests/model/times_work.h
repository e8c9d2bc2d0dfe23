// The products whose times are modelled.
#pragma once

#include <cstdint>
#include <vector>

namespace axonn::times {

inline constexpr int64_t kElementBytes = 2;

// One rank's product [m, k] @ [k, n] of a fused call. A gather brings the rows of A; a scatter
// takes the rows of the result.
struct Work {
  int64_t m;
  int64_t n;
  int64_t k;
  int32_t ranks = 8;

  int64_t gathered_bytes() const { return m * k * kElementBytes; }
  int64_t result_bytes() const { return m * n * kElementBytes; }
};

// The layers that Flux and Triton-distributed publish: out and in features, over all ranks.
struct Layer {
  int64_t n;
  int64_t k;
};
inline constexpr Layer kLayers[] = {{11008, 4096}, {14336, 4096},  {28672, 8192},
                                    {29568, 8192}, {53248, 16384}, {49152, 12288}};
inline constexpr int64_t kRows[] = {1024, 2048, 4096, 8192, 16384};

inline std::vector<Work> gathers(int32_t ranks = 8) {
  std::vector<Work> result;
  for (const Layer& layer : kLayers) {
    for (const int64_t m : kRows) result.push_back({m, layer.n / ranks, layer.k, ranks});
  }
  return result;
}

// The transposed layers, whose input features are divided among the ranks.
inline std::vector<Work> scatters(int32_t ranks = 8) {
  std::vector<Work> result;
  for (const Layer& layer : kLayers) {
    for (const int64_t m : kRows) result.push_back({m, layer.k, layer.n / ranks, ranks});
  }
  return result;
}

}  // namespace axonn::times
