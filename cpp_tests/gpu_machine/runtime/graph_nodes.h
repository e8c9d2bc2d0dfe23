// The nodes of a graph, and orders in which they may run one after the other.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace axonn::gpu_machine {

// The work that one node of a graph enqueues on a stream of the machine.
struct Node {
  // Kernels are ours and NCCL's. The last two kinds are for external events.
  enum class Kind { kKernel, kWork, kRecord, kWait };
  Kind kind = Kind::kWork;
  int device = 0;
  std::vector<size_t> after;                // nodes that were all added before
  std::function<void(int stream)> enqueue;  // for kernels and work
  cudaEvent_t event = nullptr;
};

// Returns the indices of all nodes, each after those that it depends on.
using NodeOrder = std::function<std::vector<size_t>(const std::vector<Node>& nodes)>;

// No kernel runs after a copy or value write that it does not depend on. A kernel that waits for a
// flag from another branch then waits in vain.
std::vector<size_t> kernels_first(const std::vector<Node>& nodes);
// No copy or value write runs after a kernel that it does not depend on.
std::vector<size_t> kernels_last(const std::vector<Node>& nodes);

// A random order, for which `draw(below)` returns numbers below `below`.
std::vector<size_t> random_order(const std::vector<Node>& nodes,
                                 const std::function<uint32_t(uint32_t below)>& draw);

// Throws std::invalid_argument if this is not such an order.
void check_order(const std::vector<size_t>& order, const std::vector<Node>& nodes);

}  // namespace axonn::gpu_machine
