#include "gpu_machine/ptx_reader.h"

#include <algorithm>
#include <cstring>

#include "gpu_machine/errors.h"

namespace axonn::gpu_machine {

bool PtxReader::take_if(std::string_view what) {
  const bool found = now().is(what);
  if (found) take();
  return found;
}

void PtxReader::fail(const std::string& what) const {
  throw ParseError("PTX line " + std::to_string(now().line) + ": " + what + ", got '" + now().text +
                   "'");
}

void PtxReader::expect(std::string_view what) {
  if (!take_if(what)) fail("expected '" + std::string(what) + "'");
}

uint64_t PtxReader::number() {
  if (now().kind != Token::Kind::kNumber) fail("expected a number");
  return take().bits;
}

std::string PtxReader::name() {
  if (now().kind != Token::Kind::kWord) fail("expected a name");
  return take().text;
}

void PtxReader::skip_line(int line) {
  while (now().line == line && now().kind != Token::Kind::kEnd) take();
}

std::string PtxReader::text_since(size_t place) const {
  std::string text;
  for (size_t i = place; i < at_; ++i) {
    const bool tight = i == place || tokens_[i].kind == Token::Kind::kPunctuation ||
                       tokens_[i - 1].is("[") || tokens_[i - 1].is("{") || tokens_[i - 1].is("@") ||
                       tokens_[i - 1].is("-");
    text += (tight ? "" : " ") + tokens_[i].text;
  }
  return text;
}

Variable PtxReader::variable(bool is_extern) {
  Variable made;
  made.is_extern = is_extern;
  const std::string space = take().text;
  made.space = space == ".param"    ? Space::kParam
               : space == ".shared" ? Space::kShared
               : space == ".local"  ? Space::kLocal
               : space == ".const"  ? Space::kConst
                                    : Space::kGlobal;
  if (take_if(".align")) made.alignment = number();
  const Type type = type_of(name().substr(1));
  if (type.bits == 0) fail("expected the type of a variable before this");
  const auto element = static_cast<uint64_t>(type.register_bytes());
  made.alignment = std::max(made.alignment, element);
  while (now().is(".ptr") || now().is(".align") || now().is(".global") || now().is(".shared")) {
    if (take().is(".align")) number();  // alignment of a pointer's target
  }
  made.name = name();
  made.bytes = element;
  while (take_if("[")) {
    made.bytes *= now().is("]") ? 0 : number();
    expect("]");
  }
  if (take_if("=")) initializer(made, type);
  return made;
}

void PtxReader::initializer(Variable& variable, Type type) {
  variable.contents.resize(variable.bytes);
  const size_t element = static_cast<size_t>(type.register_bytes());
  size_t place = 0;
  const bool in_braces = take_if("{");
  do {
    const bool negative = take_if("-");
    const Token value = now();
    uint64_t bits = number();
    if (negative) bits = ~bits + 1;
    if (value.letter == 'f' && type.bits == 32) {
      double wide = 0;
      std::memcpy(&wide, &bits, sizeof(wide));
      const auto narrow = static_cast<float>(wide);
      std::memcpy(&bits, &narrow, sizeof(narrow));
    }
    if (place + element > variable.bytes) fail("the initializer is longer than the variable");
    std::memcpy(variable.contents.data() + place, &bits, element);
    place += element;
  } while (take_if(","));
  if (in_braces) expect("}");
}

}  // namespace axonn::gpu_machine
