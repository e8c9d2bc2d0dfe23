// goldfish_labels in ATen's ops, for devices for which no kernel is built. int64 holds the bits of
// the hash: its sums and products wrap around as those of uint64 do.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <cstdint>
#include <limits>

#include "ops/goldfish.h"

namespace axonn::ops {
namespace {

at::Tensor shifted_right(const at::Tensor& word, int64_t bits) {
  const int64_t mask = (int64_t{1} << (64 - bits)) - 1;  // without the copies of the sign
  return at::bitwise_right_shift(word, bits).bitwise_and_(mask);
}

at::Tensor mix_bits(at::Tensor word) {
  word = word.bitwise_xor(shifted_right(word, 30)).mul_(static_cast<int64_t>(0xBF58476D1CE4E5B9u));
  word = word.bitwise_xor(shifted_right(word, 27)).mul_(static_cast<int64_t>(0x94D049BB133111EBu));
  return word.bitwise_xor(shifted_right(word, 31));
}

// Whether the targets h, h + 1, ... of each row are dropped.
at::Tensor drops(const GoldfishCall& call) {
  const auto& rule = call.rule;
  const int64_t length = call.tokens.size(-1), count = length - rule.h;
  const int64_t first = rule.with_target ? 1 : 0;
  auto state = at::zeros_like(call.tokens.narrow(-1, 0, count));
  for (int64_t i = 0; i < rule.h; ++i) {
    const auto ids = call.tokens.narrow(-1, first + i, count);
    state = mix_bits(state + ids + static_cast<int64_t>(0x9E3779B97F4A7C15u));
  }
  // Unsigned numbers are in the order of signed ones whose highest bit is flipped.
  constexpr int64_t kHighest = std::numeric_limits<int64_t>::min();
  auto found = state.bitwise_xor(kHighest) <= (static_cast<int64_t>(rule.last_dropped) ^ kHighest);
  if (call.documents) {
    const auto& numbers = *call.documents;
    const auto same = numbers.narrow(-1, 1, length - 1) == numbers.narrow(-1, 0, length - 1);
    for (int64_t i = 0; i < rule.h; ++i) found.logical_and_(same.narrow(-1, i, count));
  }
  return found;
}

at::Tensor goldfish_labels(const at::Tensor& tokens, const std::optional<at::Tensor>& documents,
                           int64_t k, int64_t h, bool with_target, int64_t ignore_index) {
  const auto call = GoldfishCall::of(tokens, documents, k, h, with_target);
  const int64_t targets = call.labels.size(-1);
  call.labels.copy_(call.tokens.narrow(-1, 1, targets));
  if (h <= targets) {
    call.labels.narrow(-1, h - 1, targets - h + 1).masked_fill_(drops(call), ignore_index);
  }
  return call.labels;
}

}  // namespace

// A kernel of the device itself comes before this.
TORCH_LIBRARY_IMPL(axonn, CompositeExplicitAutograd, m) {
  m.impl(kGoldfishLabels, &goldfish_labels);
}

}  // namespace axonn::ops
