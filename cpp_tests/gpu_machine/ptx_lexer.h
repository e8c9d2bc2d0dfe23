// Splits PTX into words, numbers, strings and punctuation.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace axonn::gpu_machine {

struct Token {
  enum class Kind : uint8_t { kWord, kNumber, kString, kPunctuation, kEnd };

  Kind kind = Kind::kEnd;
  std::string text;  // for a word, with its modifiers: "ld.global.u32"
  int line = 0;
  uint64_t bits = 0;  // for a number
  char letter = 's';  // for a number: 'f' if it is 0f or 0d
  bool is(std::string_view what) const { return kind != Kind::kString && text == what; }
};

// Drops comments. The last token is kEnd.
std::vector<Token> split_ptx(std::string_view text);

}  // namespace axonn::gpu_machine
