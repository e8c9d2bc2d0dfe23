// One NCCL call of a rank, and what the calls of all ranks must have in common.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <string>
#include <vector>

namespace axonn::gpu_machine::nccl {

enum class Kind {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllToAll,
  kSend,
  kReceive
};

struct Call {
  Kind kind;
  const void* input = nullptr;
  void* output = nullptr;
  int64_t count = 0;  // elements, as NCCL counts them for this kind
  ncclDataType_t dtype = ncclInt8;
  ncclRedOp_t op = ncclSum;  // for sums
  int peer = -1;             // the root, or the other rank of a transfer
  cudaStream_t stream = nullptr;

  bool is_transfer() const { return kind == Kind::kSend || kind == Kind::kReceive; }
  bool is_sum() const {
    return kind == Kind::kReduceScatter || kind == Kind::kAllReduce || kind == Kind::kReduce;
  }
};

// Returns 0 for a dtype that NCCL does not have.
int64_t size_of(ncclDataType_t dtype);

// "all_reduce(ncclSum) of 12 float32"
std::string describe(const Call& call);

// Whether calls of two ranks may be the same collective.
bool agree(const Call& one, const Call& other);

// A block of elements that a call moves or sums, from some ranks to some ranks. All blocks of a
// call have `count` elements.
struct Block {
  std::vector<int> sources, sinks;
  // Its offset in the input of a source and in the output of a sink, in elements.
  int64_t input = 0, output = 0;
};
std::vector<Block> blocks_of(const Call& call, int rank, int num_ranks);

}  // namespace axonn::gpu_machine::nccl
