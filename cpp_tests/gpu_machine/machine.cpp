// The host's side: loads kernels and enqueues work.
#include "gpu_machine/machine.h"

#include <algorithm>
#include <utility>

namespace axonn::gpu_machine {
namespace {

// The kernel together with the module's shared variables.
std::shared_ptr<const Program> decoded(const Function& kernel, const Module& module,
                                       const Symbols& symbols) {
  Function whole = kernel;
  for (const Variable& variable : module.variables) {
    if (variable.space == Space::kShared) whole.variables.push_back(variable);
  }
  return std::make_shared<const Program>(decode(whole, symbols, module.files));
}

}  // namespace

Machine::Machine(const Options& options) : options_(options), random_(options.seed) {
  actors_.emplace_back();  // actor 0 stands for none
}

void Machine::load(std::string_view ptx) {
  for (auto& [name, program] : load_apart(ptx)) programs_[name] = std::move(program);
}

std::map<std::string, std::shared_ptr<const Program>> Machine::load_apart(std::string_view ptx) {
  const Module module = parse_ptx(ptx);
  add_variables(module);
  std::map<std::string, std::shared_ptr<const Program>> programs;
  for (const auto& [name, kernel] : module.kernels) {
    programs[name] = decoded(kernel, module, symbols_);
  }
  return programs;
}

void Machine::load(const Module& module) {
  add_variables(module);
  const auto symbols = std::make_shared<const Symbols>(symbols_);
  for (const auto& [name, kernel] : module.kernels) {
    undecoded_.insert_or_assign(name, Undecoded{&module, &kernel, symbols});
  }
}

void Machine::add_variables(const Module& module) {
  for (const Variable& variable : module.variables) {
    if (variable.space == Space::kShared) continue;
    const uint64_t address = memory_.allocate(variable.bytes, variable.name);
    std::vector<std::byte> contents = variable.contents;
    contents.resize(variable.bytes);  // the rest is zero
    memory_.write(address, contents.data(), contents.size());
    memory_.find(address)->read_only = variable.space == Space::kConst;
    symbols_[variable.name] = address;
  }
}

std::shared_ptr<const Program> Machine::kernel_named(const std::string& name) {
  if (const auto found = undecoded_.find(name); found != undecoded_.end()) {
    const auto& [module, kernel, symbols] = found->second;
    programs_[name] = decoded(*kernel, *module, *symbols);
    undecoded_.erase(found);
  }
  const auto found = programs_.find(name);
  return found == programs_.end() ? nullptr : found->second;
}

std::shared_ptr<const Program> Machine::kernel(std::string_view part_of_name) const {
  std::shared_ptr<const Program> found;
  std::string names;
  for (const auto& [name, program] : programs_) {
    if (name.find(part_of_name) == std::string::npos) continue;
    names += " " + name;
    found = program;
  }
  if (found == nullptr || names.find(' ', 1) != std::string::npos) {
    throw std::invalid_argument("expected one kernel whose name contains '" +
                                std::string(part_of_name) + "', got:" + names);
  }
  return found;
}

int Machine::new_stream(int device) {
  streams_.emplace_back();
  streams_.back().device = device;
  return static_cast<int>(streams_.size()) - 1;
}

void Machine::enqueue(int stream, const std::shared_ptr<const Program>& program, Dim grid,
                      Dim block, const std::vector<std::vector<std::byte>>& args,
                      uint64_t dynamic_shared_bytes, Dim cluster, bool is_cooperative,
                      bool overlaps) {
  const auto fail = [&](const std::string& what) {
    throw std::invalid_argument("launch of " + program->name + ": " + what);
  };
  if (args.size() != program->params.size()) {
    fail("expected " + std::to_string(program->params.size()) + " arguments, got " +
         std::to_string(args.size()));
  }
  if (grid.count() == 0 || block.count() == 0 || block.count() > 1024) {
    fail("a grid is not empty, and a block has 1 to 1024 threads, got " +
         std::to_string(block.count()));
  }
  if (program->max_threads != 0 && block.count() > static_cast<uint64_t>(program->max_threads)) {
    fail("expected at most " + std::to_string(program->max_threads) + " threads, got " +
         std::to_string(block.count()));
  }
  if (cluster.count() == 0 || cluster.count() > kMostClusterCtas || grid.x % cluster.x != 0 ||
      grid.y % cluster.y != 0 || grid.z % cluster.z != 0) {
    fail("a cluster has 1 to " + std::to_string(kMostClusterCtas) +
         " CTAs, and a grid whole clusters in each direction");
  }
  if (program->cluster.count() > 1 && program->cluster != cluster) {
    fail("expected the clusters that the kernel was compiled for");
  }
  if (cluster.count() > static_cast<uint64_t>(options_.resident_ctas)) {
    fail("a cluster of " + std::to_string(cluster.count()) + " CTAs does not fit the device");
  }
  const Footprint footprint = footprint_of(*program, block.count(), dynamic_shared_bytes);
  const uint64_t together = is_cooperative ? grid.count() : cluster.count();
  if (together > static_cast<uint64_t>(ctas_of_sm(footprint) * options_.sms)) {
    fail(std::to_string(together) + " CTAs that must be resident together do not fit the " +
         std::to_string(options_.sms) + " SMs, of which each holds " +
         std::to_string(ctas_of_sm(footprint)));
  }
  auto launch = std::make_unique<Launch>();
  launch->footprint = footprint;
  launch->is_cooperative = is_cooperative;
  launch->program = program;
  launch->grid = grid;
  launch->block = block;
  launch->cluster = cluster;
  launch->overlaps = overlaps;
  launch->dynamic_shared_bytes = dynamic_shared_bytes;
  launch->device = streams_.at(static_cast<size_t>(stream)).device;
  launch->params = std::make_unique<Region>("kernel parameters", program->param_bytes);
  for (size_t i = 0; i < args.size(); ++i) {
    const uint64_t expected = program->params[i].bytes, offset = program->param_offsets[i];
    if (args[i].size() != expected) {
      fail("parameter " + std::to_string(i) + " has " + std::to_string(expected) + " bytes, got " +
           std::to_string(args[i].size()));
    }
    std::copy(args[i].begin(), args[i].end(), launch->params->bytes.data() + offset);
    launch->params->mark(offset, expected, kWritten);
  }
  launch->params->read_only = true;
  push(stream, {.launch = std::move(launch), .copy = nullptr, .task = nullptr, .before = {}});
}

void Machine::push(int stream, Work work) {
  work.before = host_clock_;
  streams_.at(static_cast<size_t>(stream)).queue.push_back(std::move(work));
  note_change();
}

void Machine::copy(int stream, uint64_t target, uint64_t source, uint64_t bytes) {
  auto copy = std::make_unique<Copy>();
  copy->target = target;
  copy->source = source;
  copy->bytes = bytes;
  push(stream, {.launch = nullptr, .copy = std::move(copy), .task = nullptr, .before = {}});
}

void Machine::fill(int stream, uint64_t target, int value, uint64_t bytes) {
  auto copy = std::make_unique<Copy>();
  copy->target = target;
  copy->bytes = bytes;
  copy->fill = value & 0xFF;
  push(stream, {.launch = nullptr, .copy = std::move(copy), .task = nullptr, .before = {}});
}

void Machine::enqueue_task(int stream, std::function<std::string()> describe,
                           std::function<Progress(Agent&)> attempt) {
  auto task = std::make_unique<Task>();
  task->describe = std::move(describe);
  task->attempt = std::move(attempt);
  push(stream, {.launch = nullptr, .copy = nullptr, .task = std::move(task), .before = {}});
}

void Machine::enqueue_task(int stream, std::string what, std::function<bool(Agent&)> attempt) {
  enqueue_task(
      stream, [what = std::move(what)] { return what; },
      [attempt = std::move(attempt)](Agent& agent) {
        return attempt(agent) ? Progress::kDone : Progress::kWaits;
      });
}

void Machine::enqueue_order(int stream, std::string what, std::function<bool(Agent&)> attempt) {
  enqueue_task(stream, std::move(what), std::move(attempt));
  streams_.at(static_cast<size_t>(stream)).queue.back().task->only_orders = true;
}

bool Machine::take_ctas(int device, int count) {
  if (resident_[device] + count > options_.resident_ctas) return false;
  resident_[device] += count;
  return true;
}

const Actor& Machine::new_actor(Actor actor) {
  actor.id = static_cast<uint32_t>(actors_.size());
  if (actor.id >= kMostActors) throw std::length_error("a run has more agents than marks can name");
  actors_.push_back(actor);
  return actors_.back();
}

}  // namespace axonn::gpu_machine
