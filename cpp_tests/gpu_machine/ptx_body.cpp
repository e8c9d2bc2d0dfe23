// Parses the body of a function: registers, labels and instructions.
#include <algorithm>

#include "gpu_machine/errors.h"
#include "gpu_machine/ptx_reader.h"

namespace axonn::gpu_machine {
namespace {

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

class BodyParser {
 public:
  BodyParser(PtxReader& reader, Function& function) : reader_(reader), function_(function) {}

  void run() {
    reader_.expect("{");
    scopes_.push_back({next_scope_++, {}});
    while (!scopes_.empty()) parse_statement();
    resolve_labels();
  }

 private:
  // A block in braces. Registers and variables declared in it hide outer ones.
  struct Scope {
    int id = 0;
    std::map<std::string, std::string> names;
  };
  struct LabelUse {
    size_t instruction;
    std::vector<int> scopes;
  };

  void parse_statement() {
    const Token token = reader_.now();
    if (token.kind == Token::Kind::kEnd) reader_.fail("expected '}'");
    if (reader_.take_if("{")) {
      scopes_.push_back({next_scope_++, {}});
    } else if (reader_.take_if("}")) {
      scopes_.pop_back();
    } else if (token.is(".loc")) {
      reader_.take();
      where_.file = static_cast<int>(reader_.number());
      where_.cuda_line = static_cast<int>(reader_.number());
      reader_.skip_line(token.line);
    } else if (token.is(".reg")) {
      parse_registers();
    } else if (token.is(".shared") || token.is(".extern") || token.is(".local") ||
               token.is(".param")) {
      const bool is_extern = reader_.take_if(".extern");
      function_.variables.push_back(reader_.variable(is_extern));
      function_.variables.back().name = declare(function_.variables.back().name);
      reader_.expect(";");
    } else if (token.is(".pragma")) {
      reader_.skip_line(token.line);
    } else if (reader_.next().is(":")) {
      function_.labels[label(reader_.take().text, scopes_.back().id)] =
          function_.instructions.size();
      reader_.take();
    } else {
      parse_instruction();
    }
  }

  static std::string label(const std::string& text, int scope) {
    return text + "@" + std::to_string(scope);
  }

  void parse_registers() {
    reader_.take();
    const Type type = type_of(reader_.name().substr(1));
    if (type.bits == 0) reader_.fail("expected the type of a register before this");
    do {
      const std::string base = reader_.name();
      if (reader_.take_if("<")) {
        const uint64_t count = reader_.number();
        for (uint64_t i = 0; i < count; ++i) {
          function_.registers[declare(base + std::to_string(i))] = type;
        }
        reader_.expect(">");
      } else {
        function_.registers[declare(base)] = type;
      }
    } while (reader_.take_if(","));
    reader_.expect(";");
  }

  // Declares a name in the current scope, and returns its unique form.
  std::string declare(const std::string& text) {
    const int id = scopes_.back().id;
    return scopes_.back().names[text] = id == 0 ? text : label(text, id);
  }

  // The unique name of a register or variable; other names are unchanged.
  std::string unique_name(const std::string& text) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto found = scope->names.find(text);
      if (found != scope->names.end()) return found->second;
    }
    return text;
  }

  void parse_instruction() {
    Instruction instruction;
    const size_t begin = reader_.place();
    where_.ptx = reader_.now().line;
    instruction.where = where_;
    if (reader_.take_if("@")) {
      instruction.guard_negated = reader_.take_if("!");
      instruction.guard = unique_name(reader_.name());
    }
    const auto parts = split_at_dots(reader_.name());
    instruction.opcode = parts[0];
    instruction.modifiers.assign(parts.begin() + 1, parts.end());
    while (!reader_.now().is(";")) {
      instruction.operands.push_back(parse_operand());
      if (!reader_.now().is(";")) reader_.expect(",");
    }
    instruction.text = reader_.text_since(begin);
    reader_.take();
    if (instruction.opcode == "bra") note_label_use(instruction);
    function_.instructions.push_back(std::move(instruction));
  }

  void note_label_use(const Instruction& instruction) {
    if (instruction.operands.size() != 1) reader_.fail("expected one label of bra before this");
    LabelUse use{function_.instructions.size(), {}};
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      use.scopes.push_back(scope->id);
    }
    label_uses_.push_back(use);
  }

  void resolve_labels() {
    for (const LabelUse& use : label_uses_) {
      Operand& operand = function_.instructions[use.instruction].operands[0];
      const auto scope = std::find_if(use.scopes.begin(), use.scopes.end(), [&](int id) {
        return function_.labels.contains(label(operand.name, id));
      });
      if (scope == use.scopes.end()) {
        throw ParseError("kernel " + function_.name + ": there is no label '" + operand.name + "'");
      }
      operand.name = label(operand.name, *scope);
    }
  }

  Operand parse_operand() {
    Operand operand = parse_simple_operand();
    if (!reader_.take_if("|")) return operand;
    Operand pair;
    pair.kind = Operand::Kind::kVector;
    pair.parts = {operand, parse_simple_operand()};
    return pair;
  }

  Operand parse_simple_operand() {
    Operand operand;
    if (reader_.take_if("[")) {
      operand = parse_sum();
      operand.kind = Operand::Kind::kAddress;
      while (reader_.take_if(",")) operand.parts.push_back(parse_simple_operand());
      reader_.expect("]");
    } else if (reader_.take_if("{")) {
      operand.kind = Operand::Kind::kVector;
      do operand.parts.push_back(parse_simple_operand());
      while (reader_.take_if(","));
      reader_.expect("}");
    } else if (reader_.take_if("(")) {  // arguments of a call
      operand.kind = Operand::Kind::kVector;
      while (!reader_.take_if(")")) {
        operand.parts.push_back(parse_simple_operand());
        if (!reader_.now().is(")")) reader_.expect(",");
      }
    } else if (reader_.take_if("!")) {
      operand = parse_sum();
      operand.negated = true;
    } else {
      operand = parse_sum();
    }
    return operand;
  }

  // A name, a number, or a name plus an offset.
  Operand parse_sum() {
    Operand operand;
    const bool negative = reader_.take_if("-");
    if (reader_.now().kind == Token::Kind::kNumber) {
      operand.kind = Operand::Kind::kImmediate;
      operand.letter = reader_.now().letter;
      operand.bits = reader_.take().bits;
      if (negative) {
        operand.bits =
            operand.letter == 'f' ? operand.bits ^ (uint64_t{1} << 63) : ~operand.bits + 1;
      }
      operand.offset = static_cast<int64_t>(operand.bits);
      return operand;
    }
    if (negative) reader_.fail("expected a number");
    operand.name = unique_name(reader_.name());
    if (reader_.take_if("+")) {
      const bool down = reader_.take_if("-");
      const auto offset = static_cast<int64_t>(reader_.number());
      operand.offset = down ? -offset : offset;
    }
    return operand;
  }

  PtxReader& reader_;
  Function& function_;
  std::vector<Scope> scopes_;
  std::vector<LabelUse> label_uses_;
  int next_scope_ = 0;
  SourceLine where_;
};

}  // namespace

void parse_body(PtxReader& reader, Function& function) { BodyParser(reader, function).run(); }

}  // namespace axonn::gpu_machine
