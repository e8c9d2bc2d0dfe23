// The building blocks of the fused CPU ops: matrices whose parts are read in place, in the memory
// of a group's ranks, and products that are summed over ranks through staging slots.
//
// An op opens one FusedCall per group. It passes the call to the matrices that it gathers
// (Gathered, which publishes at once) and to the sum that its product drains into (Drained, which
// has one slot per part). Workspace and flags are taken in order of construction, which must be the
// same on all ranks. core/symmetric/fused_order.h has the order of waits and signals.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>
#include <vector>

#include "core/numeric/reduce.h"
#include "core/symmetric/fused_order.h"
#include "core/symmetric/symmetric_group.h"
#include "ops/group/group.h"

namespace axonn::ops::cpu {

class FusedCall;

// The flags of one matrix or sum within a call.
class Signals {
 public:
  Signals(FusedCall& call, int64_t first_flag) : call_(&call), first_flag_(first_flag) {}

  int64_t size() const;
  void signal(int64_t flag);
  void wait(int64_t peer, int64_t flag);

 private:
  FusedCall* call_;
  int64_t first_flag_;
};

// The workspace that a call needs in a group's memory.
struct Need {
  const Group& group;
  int64_t bytes;
};

// Call this before opening calls on several groups. If one group has too little memory, it
// throws CallRefused, and all groups count the call as made: they stay usable if all ranks do
// the same.
void check_memory(const comm::CallSignature& signature, std::initializer_list<Need> needs);

// One group's call of a fused op; a group of one rank needs no call.
class FusedCall {
 public:
  // `workspace_bytes` is the number of bytes that the matrices and the sum need together.
  FusedCall(const Group& group, const comm::CallSignature& signature, int64_t workspace_bytes);

  int64_t rank() const { return group_.rank; }
  int64_t size() const { return group_.size; }
  int64_t take_bytes(int64_t bytes);  // returns the offset of these bytes
  Signals take_signals(const comm::SignalLayout& layout);
  // Also compares the call with peers that were not waited for because there was nothing to read
  // from them.
  void compare();
  std::byte* own_data(int64_t offset) const { return call_->workspace() + offset; }
  const std::byte* data_of(int64_t rank, int64_t offset) const {
    return call_->workspace_of(rank) + offset;
  }

 private:
  friend class Signals;

  const Group& group_;
  std::optional<comm::Call> call_;
  int64_t next_byte_ = 0;
  int64_t next_flag_ = 0;
};

// A matrix whose parts are spread over the ranks of a group, or one that is whole on this rank.
class Gathered : public comm::GatheredParts<Signals> {
 public:
  // Returns the bytes of workspace that a call needs for a shard.
  static int64_t bytes(const Group& group, const at::Tensor& shard);

  // Publishes this rank's shard, which may have any strides. Row-major and column-major shards are
  // copied in one piece and keep their layout.
  Gathered(FusedCall& call, const at::Tensor& shard, int64_t dim);
  explicit Gathered(const at::Tensor& whole);
  // Gathers `t` if the axis has peers; otherwise takes it as whole, even if the call has peers.
  static Gathered over(const Group& axis, FusedCall& call, const at::Tensor& t, int64_t dim) {
    return axis.size > 1 ? Gathered(call, t, dim) : Gathered(t);
  }

  at::TensorOptions options() const { return parts_[rank()].options(); }
  int64_t size(int64_t d) const {
    return d == dim() ? num_parts() * length() : parts_[rank()].size(d);
  }
  // Waits for a part. The result is valid as long as the call.
  const at::Tensor& part(int64_t index);
  // Waits for a part, and returns a block of it or the block's transpose.
  at::Tensor block(int64_t part, comm::Range rows, comm::Range columns, bool transposed);
  // Copies the parts into one matrix, which is the only part from then on. It is valid as long as
  // the call.
  const at::Tensor& join();
  // Returns the whole matrix, in memory that outlives the call.
  at::Tensor take();

 private:
  static bool has_room_for_all(int64_t group_size, const at::Tensor& shard);
  int64_t shard_offset(int64_t rank) const;
  void await_all();
  bool can_join_in_place() const;
  at::Tensor joined_in_place() const;
  const at::Tensor& become(at::Tensor whole);

  std::vector<at::Tensor> parts_;  // by rank; undefined until waited for
  FusedCall* call_ = nullptr;
  int64_t offset_ = 0;
  bool has_room_for_all_ = false;  // in the workspace, from offset_ on, in rank order
  bool in_workspace_ = false;      // whether the parts were joined there
};

using comm::Drain;
using Factor = comm::Factor<Gathered>;

// A sum over ranks. The caller writes every part's slot with produce(), in the tensor's dtype. Sums
// are made in rank order in fp32 (fp64 for fp64), so their bits are equal on all ranks.
class Drained : public comm::SummedParts<Signals> {
 public:
  // Returns the bytes of workspace that a call needs for the sum.
  static int64_t bytes(const Group& group, int64_t rows, int64_t columns, Drain drain,
                       const at::TensorOptions& options);

  Drained(FusedCall& call, int64_t rows, int64_t columns, Drain drain,
          const at::TensorOptions& options, kernels::ReduceOp reduce_op = kernels::ReduceOp::kSum);

  at::TensorOptions options() const { return output_.options(); }
  at::Tensor slot(int64_t part);
  // Returns whether parts are too small to be multiplied one by one; then all slots are one matrix.
  bool in_one_piece() const { return in_one_piece_; }
  at::Tensor all_slots();
  // Returns the sum. Call it once this rank has computed every part.
  at::Tensor finish();

 private:
  static bool in_one_piece(int64_t group_size, int64_t rows, Drain drain);
  bool has_own_slot() const { return !scatters() || in_one_piece_; }
  int64_t slot_offset(int64_t source, int64_t part) const;
  void reduce(int64_t part, std::byte* destination);

  FusedCall& call_;
  kernels::ReduceOp reduce_op_;
  bool in_one_piece_;
  at::Tensor output_;
  int64_t offset_ = 0;  // of the slots
  int64_t summed_ = 0;  // of the part that this rank sums for all (all-reduce)
};

// Computes a @ b into every part of `out`, which the caller must then finish. Each tile is
// multiplied as soon as the parts that it needs have arrived. If the summed dimension comes in
// parts, products are added in rank order, in the tensors' dtype. Parts are joined first if that is
// cheaper, by a rule that depends only on sizes, and always for bfloat16 and float16 if partial
// sums would be rounded.
void multiply(Drained& out, Factor a, Factor b);

// Returns the whole product, for this rank only.
at::Tensor multiply(Factor a, Factor b);

}  // namespace axonn::ops::cpu
