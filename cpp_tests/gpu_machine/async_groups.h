// Groups of asynchronous operations that a thread or a warp waits for.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

namespace axonn::gpu_machine {

class Agent;
class AsyncOperation;

// The progress of an operation: begun; all sources read; all targets written as well.
enum class AsyncStage : uint8_t { kBegun, kRead, kDone };

// Operations that a thread or a warp commits in groups and waits for in order.
class AsyncGroups {
 public:
  using Operation = std::shared_ptr<const AsyncOperation>;

  void add(Operation operation) { open_.push_back(std::move(operation)); }
  void commit();
  // Whether all groups but the last `most` have reached the stage.
  bool have_reached(AsyncStage stage, uint32_t most) const;
  // Lets the agent learn of those groups; have_reached must hold.
  void learn(Agent& who, AsyncStage stage, uint32_t most);

 private:
  struct Group {
    std::vector<Operation> operations;
    AsyncStage learned = AsyncStage::kBegun;  // the stage already waited for
  };

  std::vector<Operation> open_;
  std::deque<Group> committed_;
};

}  // namespace axonn::gpu_machine
