#include "gpu_machine/ptx_lexer.h"

#include <algorithm>
#include <bit>
#include <cctype>

#include "gpu_machine/errors.h"

namespace axonn::gpu_machine {
namespace {

bool in_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%' ||
         c == '.';
}

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) {}

  std::vector<Token> run() {
    while (skip_blanks()) tokens_.push_back(next());
    tokens_.push_back({Token::Kind::kEnd, "the end of the file", line_, 0, 's'});
    return std::move(tokens_);
  }

 private:
  bool starts_with(std::string_view what) const { return text_.substr(at_, what.size()) == what; }

  // Returns whether there is another token.
  bool skip_blanks() {
    while (at_ < text_.size()) {
      if (starts_with("//")) {
        while (at_ < text_.size() && text_[at_] != '\n') ++at_;
      } else if (starts_with("/*")) {
        while (at_ < text_.size() && !starts_with("*/")) step();
        at_ += 2;
      } else if (std::isspace(static_cast<unsigned char>(text_[at_])) != 0) {
        step();
      } else if (starts_with(".section")) {
        skip_section();
      } else {
        return true;
      }
    }
    return false;
  }

  // A section is for debuggers: bytes in braces, often more than half of the text.
  void skip_section() {
    const size_t end = text_.find('}', std::min(text_.find('{', at_), text_.size()));
    if (end == text_.npos) {
      throw ParseError("PTX line " + std::to_string(line_) + ": .section: expected '{' and '}'");
    }
    line_ += static_cast<int>(std::count(text_.begin() + at_, text_.begin() + end, '\n'));
    at_ = end + 1;
  }

  void step() {
    if (text_[at_] == '\n') ++line_;
    ++at_;
  }

  Token next() {
    Token token;
    token.line = line_;
    const char c = text_[at_];
    if (std::isdigit(static_cast<unsigned char>(c)) != 0) {
      token.kind = Token::Kind::kNumber;
      token.text = word();
      read_number(token);
    } else if (in_word(c)) {
      token.kind = Token::Kind::kWord;
      token.text = word();
    } else if (c == '"') {
      token.kind = Token::Kind::kString;
      for (++at_; at_ < text_.size() && text_[at_] != '"'; step()) token.text += text_[at_];
      ++at_;
    } else {
      token.kind = Token::Kind::kPunctuation;
      token.text = c;
      ++at_;
    }
    return token;
  }

  // "::" is part of a word, as in shared::cta; ":" ends a label.
  std::string word() {
    const size_t begin = at_;
    while (at_ < text_.size() && (in_word(text_[at_]) || starts_with("::"))) {
      at_ += starts_with("::") ? 2 : 1;
    }
    return std::string(text_.substr(begin, at_ - begin));
  }

  void read_number(Token& token) const {
    const std::string& s = token.text;
    size_t used = 0;
    try {
      if (s.size() > 2 && s[0] == '0' &&
          (s[1] == 'f' || s[1] == 'F' || s[1] == 'd' || s[1] == 'D')) {
        token.letter = 'f';
        const uint64_t bits = std::stoull(s.substr(2), &used, 16);
        used += 2;
        const bool is_double = s[1] == 'd' || s[1] == 'D';
        // All floats are kept as doubles, which represent each of them exactly.
        token.bits = is_double ? bits
                               : std::bit_cast<uint64_t>(static_cast<double>(
                                     std::bit_cast<float>(static_cast<uint32_t>(bits))));
      } else if (s.find('.') != std::string::npos) {
        token.letter = 'f';
        token.bits = std::bit_cast<uint64_t>(std::stod(s, &used));
      } else {
        token.bits = std::stoull(s, &used, 0);
        if (used + 1 == s.size() && s.back() == 'U') ++used;
      }
    } catch (const std::exception&) {
      used = 0;
    }
    if (used != s.size()) {
      throw ParseError("PTX line " + std::to_string(token.line) + ": '" + s + "' is not a number");
    }
  }

  std::string_view text_;
  size_t at_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> split_ptx(std::string_view text) { return Lexer(text).run(); }

}  // namespace axonn::gpu_machine
