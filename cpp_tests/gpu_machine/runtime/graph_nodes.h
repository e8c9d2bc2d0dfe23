// The nodes of a graph, and orders in which they may run one after the other.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace axonn::gpu_machine {

// What one node of a graph enqueues on a stream of the machine.
struct Node {
  // Kernels are ours and NCCL's. The last two are those of external events.
  enum class Kind { kKernel, kWork, kRecord, kWait };
  Kind kind = Kind::kWork;
  int device = 0;
  std::vector<size_t> after;                // nodes, all of which were added before
  std::function<void(int stream)> enqueue;  // of kernels and work
  cudaEvent_t event = nullptr;
};

// Returns the numbers of all nodes, each behind those that it comes after.
using NodeOrder = std::function<std::vector<size_t>(const std::vector<Node>& nodes)>;

// No kernel runs behind copies or written values that it does not come after. A kernel that waits
// for a flag which another branch raises then waits in vain.
std::vector<size_t> kernels_first(const std::vector<Node>& nodes);
// No copy or written value runs behind kernels that it does not come after.
std::vector<size_t> kernels_last(const std::vector<Node>& nodes);

// An order that `draw`, which returns a number below another one, decides.
std::vector<size_t> random_order(const std::vector<Node>& nodes,
                                 const std::function<uint32_t(uint32_t below)>& draw);

// Throws std::invalid_argument unless it is such an order.
void check_order(const std::vector<size_t>& order, const std::vector<Node>& nodes);

}  // namespace axonn::gpu_machine
