// Shared by both halves of the parser: reads a text's tokens in order, and parses variables.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "gpu_machine/ptx.h"
#include "gpu_machine/ptx_lexer.h"

namespace axonn::gpu_machine {

class PtxReader {
 public:
  explicit PtxReader(std::string_view text) : tokens_(split_ptx(text)) {}

  const Token& now() const { return tokens_[at_]; }
  const Token& next() const { return tokens_[at_ + 1]; }  // must not be called at the end
  const Token& take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool take_if(std::string_view what);
  [[noreturn]] void fail(const std::string& what) const;
  void expect(std::string_view what);
  uint64_t number();
  std::string name();
  void skip_line(int line);
  // text_since(place()) returns the text read since then, with few blanks.
  size_t place() const { return at_; }
  std::string text_since(size_t place) const;

  // .shared .align 4 .b8 name[32] = {1, 2}
  Variable variable(bool is_extern);

 private:
  void initializer(Variable& variable, Type type);

  std::vector<Token> tokens_;
  size_t at_ = 0;
};

// Reads a function's body, from { to }, into the function, whose head was read before.
void parse_body(PtxReader& reader, Function& function);

}  // namespace axonn::gpu_machine
