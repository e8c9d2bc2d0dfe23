// Parses a module, except for the bodies of functions.
#include <set>

#include "gpu_machine/errors.h"
#include "gpu_machine/ptx.h"
#include "gpu_machine/ptx_reader.h"

namespace axonn::gpu_machine {
namespace {

const std::set<std::string_view> kLinkage = {".visible", ".weak", ".extern"};
// Directives that the machine ignores, each of them on a line of its own.
const std::set<std::string_view> kIgnoredLines = {
    ".version", ".target", ".address_size", ".pragma", ".explicitcluster", ".maxclusterrank"};

class Parser {
 public:
  explicit Parser(std::string_view text) : reader_(text) {}

  Module run() {
    while (reader_.now().kind != Token::Kind::kEnd) parse_module_statement();
    for (auto& [name, kernel] : module_.kernels) {
      kernel = inline_calls(kernel, module_.functions);
    }
    return std::move(module_);
  }

 private:
  void parse_module_statement() {
    bool is_extern = false;
    while (kLinkage.contains(reader_.now().text)) is_extern |= reader_.take().is(".extern");
    const std::string word = reader_.now().text;
    const int line = reader_.now().line;
    if (kIgnoredLines.contains(word)) {
      reader_.skip_line(line);
    } else if (word == ".file") {
      reader_.take();
      const int id = static_cast<int>(reader_.number());
      module_.files[id] = reader_.take().text;
      reader_.skip_line(line);
    } else if (word == ".entry") {
      reader_.take();
      parse_kernel();
    } else if (word == ".func") {
      reader_.take();
      parse_function();
    } else if (word == ".global" || word == ".const" || word == ".shared") {
      module_.variables.push_back(reader_.variable(is_extern));
      reader_.expect(";");
    } else {
      reader_.fail("expected a directive that the machine knows");
    }
  }

  // (.param .b32 a, .param .b64 b); empty if there are no parentheses.
  std::vector<Variable> parse_params() {
    std::vector<Variable> params;
    if (!reader_.take_if("(") || reader_.take_if(")")) return params;
    do {
      if (!reader_.now().is(".param")) reader_.fail("expected '.param'");
      params.push_back(reader_.variable(false));
    } while (reader_.take_if(","));
    reader_.expect(")");
    return params;
  }

  // A declaration without a body is dropped.
  void parse_function() {
    Function made;
    made.results = parse_params();
    made.name = reader_.name();
    made.params = parse_params();
    while (reader_.take_if(".noreturn")) {
    }
    if (reader_.take_if(";")) return;
    parse_body(reader_, made);
    const std::string function_name = made.name;
    module_.functions[function_name] = std::move(made);
  }

  void parse_kernel() {
    Function made;
    made.name = reader_.name();
    made.params = parse_params();
    while (!reader_.now().is("{")) {
      const int line = reader_.now().line;
      if (reader_.now().is(".maxntid") || reader_.now().is(".reqntid")) {
        reader_.take();
        uint64_t threads = reader_.number();
        while (reader_.take_if(",")) threads *= reader_.number();
        made.max_threads = static_cast<int>(threads);
      } else if (reader_.take_if(".minnctapersm")) {
        made.min_ctas = static_cast<int>(reader_.number());
      } else if (reader_.take_if(".maxnreg")) {
        made.max_registers = static_cast<int>(reader_.number());
      } else if (reader_.take_if(".reqnctapercluster")) {
        made.cluster.x = static_cast<uint32_t>(reader_.number());
        if (reader_.take_if(",")) made.cluster.y = static_cast<uint32_t>(reader_.number());
        if (reader_.take_if(",")) made.cluster.z = static_cast<uint32_t>(reader_.number());
      } else if (kIgnoredLines.contains(reader_.now().text)) {
        reader_.skip_line(line);
      } else {
        reader_.fail("expected a directive of a kernel that the machine knows");
      }
    }
    parse_body(reader_, made);
    const std::string kernel_name = made.name;
    module_.kernels[kernel_name] = std::move(made);
  }

  PtxReader reader_;
  Module module_;
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
