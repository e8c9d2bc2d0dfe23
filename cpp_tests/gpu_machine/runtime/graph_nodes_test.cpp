// Orders in which a graph's nodes run one after the other.
#include "gpu_machine/runtime/graph_nodes.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/cuda/reduce.h"
#include "gpu_machine/runtime/runtime_case.h"

namespace axonn::gpu_machine {
namespace {

using testing::device_words;
using testing::fill;
using testing::first_word;
using testing::kSeeds;
using testing::kWords;
using testing::new_event;
using testing::stream_with;

using Order = std::vector<size_t>;

Node node(Node::Kind kind, std::vector<size_t> after) {
  Node made;
  made.kind = kind;
  made.after = std::move(after);
  return made;
}

// A fused gather: after a kernel, one branch pushes rows; in the other one, a kernel waits for rows
// after a copy.
std::vector<Node> gather() {
  using enum Node::Kind;
  return {node(kKernel, {}), node(kWork, {0}),   node(kWork, {1}),
          node(kWork, {0}),  node(kKernel, {3}), node(kKernel, {2, 4})};
}

TEST(GraphNodes, KernelsComeFirstOrLast) {
  EXPECT_EQ(kernels_first(gather()), (Order{0, 3, 4, 1, 2, 5}));
  EXPECT_EQ(kernels_last(gather()), (Order{0, 1, 2, 3, 4, 5}));
  EXPECT_TRUE(kernels_first({}).empty());
}

TEST(GraphNodes, AnOrderHasEachNodeBehindThoseThatItComesAfter) {
  const std::vector<Node> nodes = gather();
  check_order({0, 3, 1, 4, 2, 5}, nodes);
  for (const Order& wrong : {Order{0, 1, 2, 3, 4}, Order{0, 1, 2, 3, 4, 4}, Order{0, 1, 2, 3, 4, 6},
                             Order{1, 0, 2, 3, 4, 5}, Order{0, 1, 2, 3, 5, 4}}) {
    EXPECT_THROW(check_order(wrong, nodes), std::invalid_argument);
  }
}

// Captures three branches of two nodes each; a node writes down its own number.
class Numbers {
 public:
  explicit Numbers(const RuntimeOptions& options) : runtime_(options) {
    cudaStream_t origin = stream_with(cudaStreamNonBlocking);
    cudaEvent_t forked = new_event();
    AXONN_CUDA_CHECK(cudaStreamBeginCapture(origin, cudaStreamCaptureModeThreadLocal));
    AXONN_CUDA_CHECK(cudaEventRecord(forked, origin));
    for (size_t branch = 0; branch < 3; ++branch) {
      cudaStream_t stream = stream_with(cudaStreamNonBlocking);
      cudaEvent_t joined = new_event();
      AXONN_CUDA_CHECK(cudaStreamWaitEvent(stream, forked, 0));
      for (size_t i = 2 * branch; i < 2 * branch + 2; ++i) {
        entries_[i] = {&written_, i};
        AXONN_CUDA_CHECK(cudaLaunchHostFunc(stream, &write_down, &entries_[i]));
      }
      AXONN_CUDA_CHECK(cudaEventRecord(joined, stream));
      AXONN_CUDA_CHECK(cudaStreamWaitEvent(origin, joined, 0));
    }
    cudaGraph_t graph = nullptr;
    AXONN_CUDA_CHECK(cudaStreamEndCapture(origin, &graph));
    AXONN_CUDA_CHECK(cudaGraphInstantiate(&exec_, graph, 0));
    AXONN_CUDA_CHECK(cudaGraphDestroy(graph));
  }
  ~Numbers() { (void)cudaGraphExecDestroy(exec_); }

  cudaError_t launch() { return cudaGraphLaunch(exec_, nullptr); }
  Order take() {
    AXONN_CUDA_CHECK(cudaDeviceSynchronize());
    return std::exchange(written_, {});
  }

 private:
  struct Entry {
    Order* written = nullptr;
    size_t number = 0;
  };
  static void write_down(void* data) {
    const auto* entry = static_cast<const Entry*>(data);
    entry->written->push_back(entry->number);
  }

  Runtime runtime_;
  Order written_;
  Entry entries_[6];
  cudaGraphExec_t exec_ = nullptr;
};

RuntimeOptions with_order(uint64_t seed, NodeOrder order) {
  RuntimeOptions options = testing::with_seed(seed);
  options.branches = Branches::kOneAfterTheOther;
  options.node_order = std::move(order);
  return options;
}

TEST(GraphNodes, RunInTheOrderThatIsAskedFor) {
  for (const Order& wanted :
       {Order{0, 1, 2, 3, 4, 5}, Order{4, 5, 2, 3, 0, 1}, Order{2, 0, 4, 1, 5, 3}}) {
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      Numbers numbers(with_order(seed, [&](const std::vector<Node>&) { return wanted; }));
      for (int replay = 0; replay < 3; ++replay) {
        EXPECT_EQ(numbers.launch(), cudaSuccess);
        EXPECT_EQ(numbers.take(), wanted);
      }
    }
  }
}

TEST(GraphNodes, RunInAnyOrderUnlessOneIsAskedFor) {
  std::vector<Order> seen;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Numbers numbers(with_order(seed, nullptr));
    EXPECT_EQ(numbers.launch(), cudaSuccess);
    const Order order = numbers.take();
    EXPECT_TRUE(std::is_permutation(order.begin(), order.end(), Order{0, 1, 2, 3, 4, 5}.begin()));
    if (std::find(seen.begin(), seen.end(), order) == seen.end()) seen.push_back(order);
  }
  EXPECT_GT(seen.size(), 1u);
}

TEST(GraphNodes, AnOrderThatBreaksTheGraphIsRefused) {
  Numbers numbers(with_order(0, [](const std::vector<Node>&) { return Order{1, 0, 2, 3, 4, 5}; }));
  EXPECT_EQ(numbers.launch(), cudaErrorInvalidConfiguration);
  EXPECT_TRUE(numbers.take().empty());
}

// A kernel and a copy that write the same words, in branches that nothing orders: when they run one
// after the other, the last one wins.
TEST(GraphNodes, KernelsOfAGraphAreKnownFromCopies) {
  for (const bool first : {false, true}) {
    RuntimeOptions options = with_order(0, first ? &kernels_first : &kernels_last);
    options.machine.checks_races = false;  // there is a race, which this order hides
    Runtime runtime(options);
    uint32_t *words = device_words(), *zeros = device_words();
    fill(zeros, 0, nullptr);
    AXONN_CUDA_CHECK(cudaDeviceSynchronize());
    cudaStream_t a = stream_with(cudaStreamNonBlocking), b = stream_with(cudaStreamNonBlocking);
    cudaEvent_t forked = new_event(), joined = new_event();
    AXONN_CUDA_CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
    AXONN_CUDA_CHECK(cudaEventRecord(forked, a));
    AXONN_CUDA_CHECK(cudaStreamWaitEvent(b, forked, 0));
    fill(words, 1, b);
    const void* sources[] = {zeros};
    AXONN_CUDA_CHECK(kernels::cuda::reduce_slots(
        words, sources, 1, kWords, kernels::DataType::kFloat32, kernels::ReduceOp::kSum, a));
    AXONN_CUDA_CHECK(cudaEventRecord(joined, b));
    AXONN_CUDA_CHECK(cudaStreamWaitEvent(a, joined, 0));
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    AXONN_CUDA_CHECK(cudaStreamEndCapture(a, &graph));
    AXONN_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    AXONN_CUDA_CHECK(cudaGraphLaunch(exec, a));
    AXONN_CUDA_CHECK(cudaStreamSynchronize(a));
    EXPECT_EQ(first_word(words), first ? 0x01010101u : 0u);
  }
}

}  // namespace
}  // namespace axonn::gpu_machine
