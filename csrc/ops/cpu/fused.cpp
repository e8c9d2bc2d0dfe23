#include "ops/cpu/fused.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/ranks/errors.h"
#include "ops/checks.h"
#include "ops/cpu/reduce_slots.h"

namespace axonn::ops::cpu {
namespace {

// Size of the header before a published shard. It says whether the shard is stored
// column-major; ranks need not agree on that.
constexpr int64_t kHeaderBytes = comm::kFlagAlignment;

// Parts with fewer rows than this are multiplied in one product, whichever ranks they are for. The
// library packs the other factor anew for each product, which costs as much as the arithmetic of
// some ten rows. A peer that gets its part a little later seldom has to wait for it.
constexpr int64_t kRowsWorthAMatmul = 512;

// If a gathered matrix has at most this many bytes, every rank's workspace has room for all of it,
// because joining small parts pays.
constexpr int64_t kRoomForAll = 4 << 20;

// An all-reduce of at most this many bytes is summed whole by every rank, which saves a round of
// signals. The number is a guess until it is tuned: this much fits in L1 and costs one page fault.
constexpr int64_t kOneShotBytes = 32 << 10;

// Each slot starts on a cache line of its own, so that no two ranks' data share one.
int64_t slot_bytes(int64_t numel, const at::TensorOptions& options) {
  const int64_t bytes = numel * static_cast<int64_t>(options.dtype().itemsize());
  return (bytes + comm::kFlagAlignment - 1) / comm::kFlagAlignment * comm::kFlagAlignment;
}

at::Tensor tensor_at(const std::byte* data, at::IntArrayRef sizes,
                     const at::TensorOptions& options) {
  return at::from_blob(const_cast<std::byte*>(data), sizes, options);
}

bool is_column_major(const at::Tensor& t) {
  return t.dim() == 2 && !t.is_contiguous() && t.t().is_contiguous();
}

}  // namespace

// --- FusedCall -----------------------------------------------------------------------------------

void check_memory(const comm::CallSignature& signature, std::initializer_list<Need> needs) {
  const auto is_too_much = [](const Need& need) {
    return need.group.size > 1 && need.bytes > need.group.shared->workspace_bytes();
  };
  if (std::none_of(needs.begin(), needs.end(), is_too_much)) return;
  std::optional<comm::CallRefused> first;
  for (const auto& need : needs) {
    if (need.group.size == 1) continue;
    auto& memory = *need.group.shared;
    try {
      const comm::Call refused(memory, signature,
                               std::max(need.bytes, memory.workspace_bytes() + 1));
    } catch (const comm::CallRefused& error) {
      if (is_too_much(need) && !first) first = error;
    }
  }
  throw comm::CallRefused(*first);
}

FusedCall::FusedCall(const Group& group, const comm::CallSignature& signature,
                     int64_t workspace_bytes)
    : group_(group) {
  if (group.size > 1) call_.emplace(*group.shared, signature, workspace_bytes);
}

int64_t FusedCall::take_bytes(int64_t bytes) {
  return std::exchange(next_byte_, next_byte_ + bytes);
}

Signals FusedCall::take_signals(const comm::SignalLayout& layout) {
  return {*this, std::exchange(next_flag_, next_flag_ + layout.num_flags())};
}

void FusedCall::compare() {
  if (call_) call_->compare();
}

int64_t Signals::size() const { return call_->size(); }
void Signals::signal(int64_t flag) { call_->call_->signal(first_flag_ + flag); }
void Signals::wait(int64_t peer, int64_t flag) { call_->call_->wait(peer, first_flag_ + flag); }

// --- Gathered ------------------------------------------------------------------------------------

bool Gathered::has_room_for_all(int64_t group_size, const at::Tensor& shard) {
  return group_size * shard.numel() * static_cast<int64_t>(shard.element_size()) <= kRoomForAll;
}

int64_t Gathered::bytes(const Group& group, const at::Tensor& shard) {
  if (group.size == 1) return 0;
  const int64_t shards = has_room_for_all(group.size, shard) ? group.size : 1;
  return kHeaderBytes + slot_bytes(shards * shard.numel(), shard.options());
}

Gathered::Gathered(const at::Tensor& whole) : GatheredParts(whole.size(0)), parts_{whole} {}

Gathered::Gathered(FusedCall& call, const at::Tensor& shard, int64_t dim)
    : GatheredParts(shard.size(dim), dim, call.rank(), call.size()),
      parts_(call.size()),
      call_(&call) {
  parts_[rank()] = shard;
  if (call.size() == 1) return;
  const int64_t header = call.take_bytes(kHeaderBytes);
  has_room_for_all_ = has_room_for_all(call.size(), shard);
  offset_ = call.take_bytes(
      slot_bytes((has_room_for_all_ ? call.size() : 1) * shard.numel(), shard.options()));
  const int64_t column_major = is_column_major(shard);
  std::memcpy(call.own_data(header), &column_major, sizeof(column_major));
  const auto stored = column_major ? shard.t() : shard;
  publish(call.take_signals(layout(call.size())), [&] {
    tensor_at(call.own_data(shard_offset(rank())), stored.sizes(), stored.options()).copy_(stored);
  });
}

int64_t Gathered::shard_offset(int64_t rank) const {
  const auto& own = parts_[this->rank()];
  const int64_t index = has_room_for_all_ ? rank : 0;
  return offset_ + index * own.numel() * static_cast<int64_t>(own.element_size());
}

const at::Tensor& Gathered::part(int64_t index) {
  auto& part = parts_[index];
  if (await(index)) {
    const auto& own = parts_[rank()];
    int64_t column_major = 0;
    std::memcpy(&column_major, call_->data_of(index, offset_ - kHeaderBytes), sizeof(column_major));
    std::vector<int64_t> sizes = own.sizes().vec();
    if (column_major) std::swap(sizes[0], sizes[1]);
    part = tensor_at(call_->data_of(index, shard_offset(index)), sizes, own.options());
    if (column_major) part = part.t();
  }
  return part;
}

const at::Tensor& Gathered::join() {
  if (num_parts() == 1) return parts_[0];
  await_all();
  in_workspace_ = can_join_in_place();
  return become(in_workspace_ ? joined_in_place() : at::cat(parts_, dim()));
}

at::Tensor Gathered::take() {
  if (num_parts() == 1) return in_workspace_ ? parts_[0].clone() : parts_[0];
  await_all();
  return become(at::cat(parts_, dim()));
}

void Gathered::await_all() {
  visit_own_first([&](int64_t index) { part(index); });
}

const at::Tensor& Gathered::become(at::Tensor whole) {
  become_whole();
  parts_ = {std::move(whole)};
  return parts_[0];
}

// If rows are gathered and all shards are row-major, this rank's shard is already in its
// place.
bool Gathered::can_join_in_place() const {
  const auto row_major = [](const at::Tensor& t) { return t.is_contiguous(); };
  return has_room_for_all_ && dim() == 0 && std::all_of(parts_.begin(), parts_.end(), row_major);
}

at::Tensor Gathered::joined_in_place() const {
  for (int64_t rank = 0; rank < num_parts(); ++rank) {
    if (rank == this->rank()) continue;
    std::memcpy(call_->own_data(shard_offset(rank)), parts_[rank].const_data_ptr(),
                parts_[rank].nbytes());
  }
  return tensor_at(call_->own_data(shard_offset(0)), {size(0), size(1)}, options());
}

// --- Drained -------------------------------------------------------------------------------------

namespace {

bool is_one_shot(int64_t rows, int64_t columns, Drain drain, const at::TensorOptions& options) {
  return drain == Drain::kAllReduce && slot_bytes(rows * columns, options) <= kOneShotBytes;
}

}  // namespace

bool Drained::in_one_piece(int64_t group_size, int64_t rows, Drain drain) {
  return drain != Drain::kScatterColumns && rows < group_size * kRowsWorthAMatmul;
}

int64_t Drained::bytes(const Group& group, int64_t rows, int64_t columns, Drain drain,
                       const at::TensorOptions& options) {
  if (group.size == 1) return 0;
  const int64_t numel = rows * columns;
  if (drain == Drain::kAllReduce) {
    const int64_t slots = slot_bytes(numel, options);
    return is_one_shot(rows, columns, drain, options) ? slots : 2 * slots;
  }
  if (in_one_piece(group.size, rows, drain)) return slot_bytes(numel, options);
  return (group.size - 1) * slot_bytes(numel / group.size, options);
}

Drained::Drained(FusedCall& call, int64_t rows, int64_t columns, Drain drain,
                 const at::TensorOptions& options, kernels::ReduceOp reduce_op)
    : SummedParts(rows, columns, drain, call.rank(), call.size(),
                  is_one_shot(rows, columns, drain, options)),
      call_(call),
      reduce_op_(reduce_op),
      in_one_piece_(call.size() > 1 && in_one_piece(call.size(), rows, drain)) {
  output_ = at::empty({scatters() ? this->rows(call.rank()).size() : rows,
                       scatters() ? this->columns(call.rank()).size() : columns},
                      options);
  if (call.size() == 1) return;
  if (has_own_slot()) {
    offset_ = call.take_bytes(slot_bytes(rows * columns, options));
    if (!scatters() && num_parts() > 1)
      summed_ = call.take_bytes(slot_bytes(rows * columns, options));
  } else {
    offset_ = call.take_bytes((call.size() - 1) * slot_bytes(output_.numel(), options));
  }
  set_signals(call.take_signals(layout()));
}

// If this rank has a slot, too, the slots together form the whole matrix. Otherwise there is one
// slot per peer, in rank order.
int64_t Drained::slot_offset(int64_t source, int64_t part) const {
  if (has_own_slot()) {
    const auto row_bytes = all_columns().size() * static_cast<int64_t>(output_.element_size());
    return offset_ + rows(part).begin * row_bytes;
  }
  const int64_t index = part < source ? part : part - 1;
  return offset_ + index * slot_bytes(output_.numel(), options());
}

at::Tensor Drained::slot(int64_t part) {
  if (call_.size() == 1 || (!has_own_slot() && part == call_.rank())) return output_;
  return tensor_at(call_.own_data(slot_offset(call_.rank(), part)),
                   {rows(part).size(), columns(part).size()}, options());
}

at::Tensor Drained::all_slots() {
  return tensor_at(call_.own_data(offset_), {all_rows().size(), all_columns().size()}, options());
}

// Adds up the slots of a part. The caller has waited for all of them.
void Drained::reduce(int64_t part, std::byte* destination) {
  std::vector<const std::byte*> sources;
  for (int64_t source = 0; source < call_.size(); ++source) {
    const bool own = !has_own_slot() && source == call_.rank();
    sources.push_back(own ? static_cast<const std::byte*>(output_.const_data_ptr())
                          : call_.data_of(source, slot_offset(source, part)));
  }
  reduce_parallel(destination, sources, rows(part).size() * columns(part).size(),
                  output_.scalar_type(), reduce_op_);
}

at::Tensor Drained::finish() {
  if (call_.size() == 1) return output_;
  auto* result = static_cast<std::byte*>(output_.mutable_data_ptr());
  const auto row_bytes = all_columns().size() * static_cast<int64_t>(output_.element_size());
  const bool sums_for_peers = !scatters() && num_parts() > 1;
  sum([&](int64_t part) { reduce(part, sums_for_peers ? call_.own_data(summed_) : result); },
      [&](int64_t part) {
        std::memcpy(result + rows(part).begin * row_bytes, call_.data_of(part, summed_),
                    static_cast<size_t>(rows(part).size() * row_bytes));
      });
  return output_;
}

}  // namespace axonn::ops::cpu
