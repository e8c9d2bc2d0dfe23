#include "gpu_machine/products.h"

#include "gpu_machine/machine.h"
#include "gpu_machine/wgmma.h"

namespace axonn::gpu_machine {

bool Product::has_ended() const {
  return operation != nullptr && operation->stage() == AsyncStage::kDone;
}

std::shared_ptr<Product> Warpgroup::begin(Warp& warp, uint64_t number,
                                          const ProductOperands& operands) {
  const uint64_t index = number - complete_;
  if (index == incomplete_.size()) {
    incomplete_.push_back(std::make_shared<Product>());
    incomplete_.back()->operands = operands;
    incomplete_.back()->seen = warp.snapshot();
  }
  const std::shared_ptr<Product> product = incomplete_[index];
  if (product->operands != operands) {
    warp.fail(MachineError::Kind::kUndefined,
              "the warps of a warpgroup give it different operands, or run different products");
  }
  product->warps[static_cast<size_t>(warp.index % kWarpsOfGroup)] = &warp;
  product->seen.meet(warp.snapshot());
  if (++product->begun < kWarpsOfGroup) return product;
  product->operation = std::make_shared<ProductOperation>(warp, *product);
  product->operation->behind = last_;
  last_ = product->operation;
  warp.machine.async().begin(product->operation);
  incomplete_.pop_front();
  ++complete_;
  return product;
}

Products::Products(uint32_t register_bytes)
    : num_registers_(register_bytes / kRegisterAlignment + 1) {}

Products::Use& Products::use(Slot slot) {
  if (uses_.empty()) uses_.resize(num_registers_);
  return uses_[slot / kRegisterAlignment];
}

void Products::begin(const Op& op, Warp& warp) {
  check_registers(op, warp);
  const auto first_warp = static_cast<size_t>(warp.index / kWarpsOfGroup * kWarpsOfGroup);
  if (first_warp + kWarpsOfGroup > warp.cta.warps.size()) {
    warp.fail(MachineError::Kind::kUndefined, "the warpgroup has fewer than four warps");
  }
  const auto one_of = [&](Slot slot) {
    const uint64_t* values = warp.lanes<uint64_t>(slot);
    for (int lane = 1; lane < kLanes; ++lane) {
      if (values[lane] != values[0]) {
        warp.fail(MachineError::Kind::kUndefined, "lanes give it different descriptors", lane);
      }
    }
    if (!MatrixDescriptor::decode(values[0])) {
      warp.fail(MachineError::Kind::kUndefined,
                "PTX does not define the matrix descriptor " + std::to_string(values[0]));
    }
    return values[0];
  };
  const uint32_t adds = warp.predicate(op.c) ^ op.negated;
  if (adds != 0 && adds != kAllLanes) {
    warp.fail(MachineError::Kind::kUndefined, "lanes give it different predicates for scale-d");
  }
  const bool a_in_memory = !has_a_in_registers(op);
  const ProductOperands operands{&op, a_in_memory ? one_of(op.a) : 0, one_of(op.b), adds != 0};
  Warpgroup& group = warp.cta.warpgroups[warp.index / kWarpsOfGroup];
  open_.push_back(group.begin(warp, begun_++, operands));
  count_registers(op, warp, 1);
}

void Products::commit() {
  committed_.push_back(std::move(open_));
  open_.clear();
}

bool Products::have_ended(uint32_t most) const {
  for (size_t i = 0; i + most < committed_.size(); ++i) {
    for (const auto& product : committed_[i]) {
      if (!product->has_ended()) return false;
    }
  }
  return true;
}

void Products::learn(Warp& warp, uint32_t most) {
  while (committed_.size() > most) {
    for (const auto& product : committed_.front()) {
      warp.clock.join(product->operation->seen_at(AsyncStage::kDone));
      count_registers(*product->operands.op, warp, -1);
    }
    committed_.pop_front();
  }
}

void Products::check_touch(const Op& op, const Warp& warp) {
  const Slot* slots = warp.touched(op);
  for (int i = 0; i < op.num_touched; ++i) {
    Use& used = use(slots[i]);
    if (used.as_sum + used.as_operand != 0) {
      warp.fail(MachineError::Kind::kUndefined,
                "uses a register of a product (wgmma) that was not waited for");
    }
    if (!op.is_move) used.touched = fences_;
  }
}

// Products of one shape may add to the same sums without a fence; all else needs one.
void Products::check_registers(const Op& op, const Warp& warp) {
  const Slot* slots = warp.list(op);
  const int sums = num_sum_slots(op), all = sums + num_a_slots(op);
  for (int i = 0; i < all; ++i) {
    Use& used = use(slots[i]);
    if (used.touched >= fences_) {
      warp.fail(MachineError::Kind::kUndefined,
                "no wgmma.fence lies between it and another use of its registers");
    }
    const bool is_sum = i < sums;
    const bool other_shape = used.op != nullptr && used.as_sum != 0 && !same_shape(*used.op, op);
    if ((is_sum ? used.as_operand != 0 || other_shape : used.as_sum != 0)) {
      warp.fail(MachineError::Kind::kUndefined,
                "uses a register of another product (wgmma) that was not waited for");
    }
    if (is_sum) used.op = &op;
  }
}

void Products::count_registers(const Op& op, const Warp& warp, int by) {
  const Slot* slots = warp.list(op);
  const int sums = num_sum_slots(op), all = sums + num_a_slots(op);
  for (int i = 0; i < all; ++i) {
    Use& used = use(slots[i]);
    (i < sums ? used.as_sum : used.as_operand) += static_cast<uint32_t>(by);
  }
}

}  // namespace axonn::gpu_machine
