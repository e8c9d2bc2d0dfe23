// Groups of asynchronous operations, for which a thread or a warp waits.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

namespace axonn::gpu_machine {

class Agent;
class AsyncOperation;

// How far an operation is: begun; all sources read; all targets written, too.
enum class AsyncStage : uint8_t { kBegun, kRead, kDone };

// Operations that a thread or a warp commits in groups, for which it waits in their order.
class AsyncGroups {
 public:
  using Operation = std::shared_ptr<const AsyncOperation>;

  void add(Operation operation) { open_.push_back(std::move(operation)); }
  void commit();
  // Whether all groups but the last `most` have reached the stage.
  bool have_reached(AsyncStage stage, uint32_t most) const;
  // Lets the agent learn of those; have_reached must hold.
  void learn(Agent& who, AsyncStage stage, uint32_t most);

 private:
  struct Group {
    std::vector<Operation> operations;
    AsyncStage learned = AsyncStage::kBegun;  // for which it was waited already
  };

  std::vector<Operation> open_;
  std::deque<Group> committed_;
};

}  // namespace axonn::gpu_machine
