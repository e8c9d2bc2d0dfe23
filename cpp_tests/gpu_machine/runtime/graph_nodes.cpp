#include "gpu_machine/runtime/graph_nodes.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace axonn::gpu_machine {
namespace {

// Places each node of the preferred kind, in capture order, right after the nodes it depends on;
// then all others.
std::vector<size_t> in_front(const std::vector<Node>& nodes, bool are_kernels) {
  std::vector<size_t> order;
  std::vector<bool> placed(nodes.size(), false);
  const std::function<void(size_t)> place = [&](size_t node) {
    if (placed[node]) return;
    placed[node] = true;
    for (const size_t other : nodes[node].after) place(other);
    order.push_back(node);
  };
  for (size_t i = 0; i < nodes.size(); ++i) {
    if ((nodes[i].kind == Node::Kind::kKernel) == are_kernels) place(i);
  }
  for (size_t i = 0; i < nodes.size(); ++i) place(i);
  return order;
}

}  // namespace

std::vector<size_t> kernels_first(const std::vector<Node>& nodes) { return in_front(nodes, true); }
std::vector<size_t> kernels_last(const std::vector<Node>& nodes) { return in_front(nodes, false); }

std::vector<size_t> random_order(const std::vector<Node>& nodes,
                                 const std::function<uint32_t(uint32_t below)>& draw) {
  std::vector<size_t> order;
  std::vector<bool> placed(nodes.size(), false);
  while (order.size() < nodes.size()) {
    std::vector<size_t> ready;
    for (size_t i = 0; i < nodes.size(); ++i) {
      const auto& after = nodes[i].after;
      const bool can = std::all_of(after.begin(), after.end(), [&](size_t a) { return placed[a]; });
      if (!placed[i] && can) ready.push_back(i);
    }
    order.push_back(ready[draw(static_cast<uint32_t>(ready.size()))]);
    placed[order.back()] = true;
  }
  return order;
}

void check_order(const std::vector<size_t>& order, const std::vector<Node>& nodes) {
  const auto fail = [](const std::string& what) {
    throw std::invalid_argument("order of a graph's nodes: " + what);
  };
  if (order.size() != nodes.size()) {
    fail("expected " + std::to_string(nodes.size()) + " nodes, got " +
         std::to_string(order.size()));
  }
  std::vector<bool> placed(nodes.size(), false);
  for (const size_t node : order) {
    if (node >= nodes.size() || placed[node]) {
      fail("expected each node once, got " + std::to_string(node));
    }
    for (const size_t other : nodes[node].after) {
      if (!placed[other]) {
        fail("node " + std::to_string(node) + " comes after " + std::to_string(other));
      }
    }
    placed[node] = true;
  }
}

}  // namespace axonn::gpu_machine
