#include <algorithm>
#include <cstring>
#include <set>

#include "gpu_machine/errors.h"
#include "gpu_machine/ptx.h"
#include "gpu_machine/ptx_lexer.h"

namespace axonn::gpu_machine {
namespace {

const std::set<std::string_view> kLinkage = {".visible", ".weak", ".extern"};
// What says nothing to the machine; each is a line.
const std::set<std::string_view> kIgnoredLines = {
    ".version", ".target", ".address_size",    ".minnctapersm",
    ".maxnreg", ".pragma", ".explicitcluster", ".maxclusterrank"};

std::vector<std::string> split_at_dots(const std::string& word) {
  std::vector<std::string> parts{""};
  for (const char c : word) {
    if (c == '.') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

class Parser {
 public:
  explicit Parser(std::string_view text) : tokens_(split_ptx(text)) {}

  Module run() {
    while (now().kind != Token::Kind::kEnd) parse_module_statement();
    for (auto& [name, kernel] : module_.kernels) {
      kernel = inline_calls(kernel, module_.functions);
    }
    return std::move(module_);
  }

 private:
  // A block in braces. Registers and variables that are declared in it hide those outside.
  struct Scope {
    int id = 0;
    std::map<std::string, std::string> names;
  };
  struct LabelUse {
    size_t instruction;
    std::vector<int> scopes;
  };

  const Token& now() const { return tokens_[at_]; }
  const Token& take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool take_if(std::string_view what) {
    const bool found = now().is(what);
    if (found) take();
    return found;
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw ParseError("PTX line " + std::to_string(now().line) + ": " + what + ", got '" +
                     now().text + "'");
  }
  void expect(std::string_view what) {
    if (!take_if(what)) fail("expected '" + std::string(what) + "'");
  }
  uint64_t number() {
    if (now().kind != Token::Kind::kNumber) fail("expected a number");
    return take().bits;
  }
  std::string name() {
    if (now().kind != Token::Kind::kWord) fail("expected a name");
    return take().text;
  }
  void skip_line(int line) {
    while (now().line == line && now().kind != Token::Kind::kEnd) take();
  }

  void parse_module_statement() {
    bool is_extern = false;
    while (kLinkage.contains(now().text)) is_extern |= take().is(".extern");
    const std::string word = now().text;
    const int line = now().line;
    if (kIgnoredLines.contains(word)) {
      skip_line(line);
    } else if (word == ".file") {
      take();
      const int id = static_cast<int>(number());
      module_.files[id] = take().text;
      skip_line(line);
    } else if (word == ".section") {
      skip_block();
    } else if (word == ".entry") {
      take();
      parse_kernel();
    } else if (word == ".func") {
      take();
      parse_function();
    } else if (word == ".global" || word == ".const" || word == ".shared") {
      module_.variables.push_back(parse_variable(is_extern));
      expect(";");
    } else {
      fail("expected a directive that the machine knows");
    }
  }

  void skip_block() {
    while (!take_if("{")) take();
    for (int depth = 1; depth > 0; take()) {
      if (now().kind == Token::Kind::kEnd) fail("expected '}'");
      depth += now().is("{") ? 1 : now().is("}") ? -1 : 0;
    }
  }

  // .shared .align 4 .b8 name[32] = {1, 2}
  Variable parse_variable(bool is_extern) {
    Variable variable;
    variable.is_extern = is_extern;
    const std::string space = take().text;
    variable.space = space == ".param"    ? Space::kParam
                     : space == ".shared" ? Space::kShared
                     : space == ".local"  ? Space::kLocal
                     : space == ".const"  ? Space::kConst
                                          : Space::kGlobal;
    if (take_if(".align")) variable.alignment = number();
    const Type type = type_of(name().substr(1));
    if (type.bits == 0) fail("expected the type of a variable before this");
    const auto element = static_cast<uint64_t>(type.register_bytes());
    variable.alignment = std::max(variable.alignment, element);
    while (now().is(".ptr") || now().is(".align") || now().is(".global") || now().is(".shared")) {
      if (take().is(".align")) number();  // what a pointer points to
    }
    variable.name = name();
    variable.bytes = element;
    while (take_if("[")) {
      variable.bytes *= now().is("]") ? 0 : number();
      expect("]");
    }
    if (take_if("=")) parse_initializer(variable, type);
    return variable;
  }

  void parse_initializer(Variable& variable, Type type) {
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

  // (.param .b32 a, .param .b64 b); nothing, if there are no parentheses.
  std::vector<Variable> parse_params() {
    std::vector<Variable> params;
    if (!take_if("(") || take_if(")")) return params;
    do {
      if (!now().is(".param")) fail("expected '.param'");
      params.push_back(parse_variable(false));
    } while (take_if(","));
    expect(")");
    return params;
  }

  void begin_function() {
    kernel_ = Function{};
    scopes_.clear();
    label_uses_.clear();
    next_scope_ = 0;
    where_ = SourceLine{};
  }

  // A declaration without a body is forgotten.
  void parse_function() {
    begin_function();
    kernel_.results = parse_params();
    kernel_.name = name();
    kernel_.params = parse_params();
    while (take_if(".noreturn")) {
    }
    if (take_if(";")) return;
    parse_body();
    module_.functions[kernel_.name] = std::move(kernel_);
  }

  void parse_kernel() {
    begin_function();
    kernel_.name = name();
    kernel_.params = parse_params();
    while (!now().is("{")) {
      const int line = now().line;
      if (now().is(".maxntid") || now().is(".reqntid")) {
        take();
        uint64_t threads = number();
        while (take_if(",")) threads *= number();
        kernel_.max_threads = static_cast<int>(threads);
      } else if (take_if(".reqnctapercluster")) {
        kernel_.cluster.x = static_cast<uint32_t>(number());
        if (take_if(",")) kernel_.cluster.y = static_cast<uint32_t>(number());
        if (take_if(",")) kernel_.cluster.z = static_cast<uint32_t>(number());
      } else if (kIgnoredLines.contains(now().text)) {
        skip_line(line);
      } else {
        fail("expected a directive of a kernel that the machine knows");
      }
    }
    parse_body();
    const std::string kernel_name = kernel_.name;
    module_.kernels[kernel_name] = std::move(kernel_);
  }

  void parse_body() {
    expect("{");
    scopes_.push_back({next_scope_++, {}});
    while (!scopes_.empty()) parse_statement();
    resolve_labels();
  }

  void parse_statement() {
    const Token token = now();
    if (token.kind == Token::Kind::kEnd) fail("expected '}'");
    if (take_if("{")) {
      scopes_.push_back({next_scope_++, {}});
    } else if (take_if("}")) {
      scopes_.pop_back();
    } else if (token.is(".loc")) {
      take();
      where_.file = static_cast<int>(number());
      where_.cuda_line = static_cast<int>(number());
      skip_line(token.line);
    } else if (token.is(".reg")) {
      parse_registers();
    } else if (token.is(".shared") || token.is(".extern") || token.is(".local") ||
               token.is(".param")) {
      const bool is_extern = take_if(".extern");
      kernel_.variables.push_back(parse_variable(is_extern));
      kernel_.variables.back().name = declare(kernel_.variables.back().name);
      expect(";");
    } else if (token.is(".pragma")) {
      skip_line(token.line);
    } else if (tokens_[at_ + 1].is(":")) {
      kernel_.labels[label(take().text, scopes_.back().id)] = kernel_.instructions.size();
      take();
    } else {
      parse_instruction();
    }
  }

  static std::string label(const std::string& text, int scope) {
    return text + "@" + std::to_string(scope);
  }

  void parse_registers() {
    take();
    const Type type = type_of(name().substr(1));
    if (type.bits == 0) fail("expected the type of a register before this");
    do {
      const std::string base = name();
      if (take_if("<")) {
        const uint64_t count = number();
        for (uint64_t i = 0; i < count; ++i) {
          kernel_.registers[declare(base + std::to_string(i))] = type;
        }
        expect(">");
      } else {
        kernel_.registers[declare(base)] = type;
      }
    } while (take_if(","));
    expect(";");
  }

  // Returns the unique name of what is declared here.
  std::string declare(const std::string& text) {
    const int id = scopes_.back().id;
    return scopes_.back().names[text] = id == 0 ? text : label(text, id);
  }

  // A register or variable by its unique name; other names stay as they are.
  std::string unique_name(const std::string& text) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto found = scope->names.find(text);
      if (found != scope->names.end()) return found->second;
    }
    return text;
  }

  void parse_instruction() {
    Instruction instruction;
    const size_t begin = at_;
    where_.ptx = now().line;
    instruction.where = where_;
    if (take_if("@")) {
      instruction.guard_negated = take_if("!");
      instruction.guard = unique_name(name());
    }
    const auto parts = split_at_dots(name());
    instruction.opcode = parts[0];
    instruction.modifiers.assign(parts.begin() + 1, parts.end());
    while (!now().is(";")) {
      instruction.operands.push_back(parse_operand());
      if (!now().is(";")) expect(",");
    }
    for (size_t i = begin; i < at_; ++i) {
      const bool tight = i == begin || tokens_[i].kind == Token::Kind::kPunctuation ||
                         tokens_[i - 1].is("[") || tokens_[i - 1].is("{") ||
                         tokens_[i - 1].is("@") || tokens_[i - 1].is("-");
      instruction.text += (tight ? "" : " ") + tokens_[i].text;
    }
    take();
    if (instruction.opcode == "bra") note_label_use(instruction);
    kernel_.instructions.push_back(std::move(instruction));
  }

  void note_label_use(const Instruction& instruction) {
    if (instruction.operands.size() != 1) fail("expected one label of bra before this");
    LabelUse use{kernel_.instructions.size(), {}};
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      use.scopes.push_back(scope->id);
    }
    label_uses_.push_back(use);
  }

  void resolve_labels() {
    for (const LabelUse& use : label_uses_) {
      Operand& operand = kernel_.instructions[use.instruction].operands[0];
      const auto scope = std::find_if(use.scopes.begin(), use.scopes.end(), [&](int id) {
        return kernel_.labels.contains(label(operand.name, id));
      });
      if (scope == use.scopes.end()) {
        throw ParseError("kernel " + kernel_.name + ": there is no label '" + operand.name + "'");
      }
      operand.name = label(operand.name, *scope);
    }
  }

  Operand parse_operand() {
    Operand operand = parse_simple_operand();
    if (!take_if("|")) return operand;
    Operand pair;
    pair.kind = Operand::Kind::kVector;
    pair.parts = {operand, parse_simple_operand()};
    return pair;
  }

  Operand parse_simple_operand() {
    Operand operand;
    if (take_if("[")) {
      operand = parse_sum();
      operand.kind = Operand::Kind::kAddress;
      while (take_if(",")) operand.parts.push_back(parse_simple_operand());
      expect("]");
    } else if (take_if("{")) {
      operand.kind = Operand::Kind::kVector;
      do operand.parts.push_back(parse_simple_operand());
      while (take_if(","));
      expect("}");
    } else if (take_if("(")) {  // arguments of a call
      operand.kind = Operand::Kind::kVector;
      while (!take_if(")")) {
        operand.parts.push_back(parse_simple_operand());
        if (!now().is(")")) expect(",");
      }
    } else if (take_if("!")) {
      operand = parse_sum();
      operand.negated = true;
    } else {
      operand = parse_sum();
    }
    return operand;
  }

  // A name, a number, or a name and an offset.
  Operand parse_sum() {
    Operand operand;
    const bool negative = take_if("-");
    if (now().kind == Token::Kind::kNumber) {
      operand.kind = Operand::Kind::kImmediate;
      operand.letter = now().letter;
      operand.bits = take().bits;
      if (negative) {
        operand.bits =
            operand.letter == 'f' ? operand.bits ^ (uint64_t{1} << 63) : ~operand.bits + 1;
      }
      operand.offset = static_cast<int64_t>(operand.bits);
      return operand;
    }
    if (negative) fail("expected a number");
    operand.name = unique_name(name());
    if (take_if("+")) {
      const bool down = take_if("-");
      const auto offset = static_cast<int64_t>(number());
      operand.offset = down ? -offset : offset;
    }
    return operand;
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  Module module_;
  Function kernel_;
  std::vector<Scope> scopes_;
  std::vector<LabelUse> label_uses_;
  int next_scope_ = 0;
  SourceLine where_;
};

}  // namespace

Type type_of(std::string_view modifier) {
  if (modifier == "pred") return {'p', 1, 1};
  if (modifier == "bf16") return {'h', 16, 1};
  if (modifier == "bf16x2") return {'h', 16, 2};
  if (modifier == "f16x2") return {'f', 16, 2};
  if (modifier.size() < 2 || std::string_view("usbf").find(modifier[0]) == std::string_view::npos) {
    return {};
  }
  for (const int bits : {8, 16, 32, 64}) {
    if (modifier.substr(1) == std::to_string(bits)) return {modifier[0], bits, 1};
  }
  return {};
}

Module parse_ptx(std::string_view text) { return Parser(text).run(); }

}  // namespace axonn::gpu_machine
