// Products of warpgroups (wgmma). Four warps begin a product together. It reads its operands and
// writes its accumulators at some time between that moment and the wait for it. Source: PTX ISA
// 9.0, section 9.7.15.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "gpu_machine/async.h"
#include "gpu_machine/matrix_descriptor.h"

namespace axonn::gpu_machine {

inline constexpr int kWarpsOfGroup = 4;

class ProductOperation;

// The operands that a warp gave an instruction; they must be equal for all warps of the group.
struct ProductOperands {
  const Op* op = nullptr;
  uint64_t a = 0, b = 0;  // descriptors; a is 0 if A is in registers
  bool adds = false;      // otherwise the accumulators are not read

  bool operator==(const ProductOperands&) const = default;
};

// A product that some of the four warps have begun. It is issued when all have.
struct Product {
  ProductOperands operands;
  std::array<Warp*, kWarpsOfGroup> warps{};
  Clock seen;  // what all warps that have begun it had seen
  int begun = 0;
  std::shared_ptr<ProductOperation> operation;

  bool has_ended() const;
};

// The products of four warps, which all begin them in the same order.
class Warpgroup {
 public:
  // The warp begins its next product, which is product number `number` of the group.
  std::shared_ptr<Product> begin(Warp& warp, uint64_t number, const ProductOperands& operands);

 private:
  std::deque<std::shared_ptr<Product>> incomplete_;
  uint64_t complete_ = 0;  // number of products that all warps have begun
  std::shared_ptr<const AsyncOperation> last_;
};

// What a warp knows of its products: the groups it waits for, and the registers they use.
class Products {
 public:
  // `register_bytes` is the size of the warp's registers.
  explicit Products(uint32_t register_bytes);

  void begin(const Op& op, Warp& warp);
  void commit();
  bool have_ended(uint32_t most) const;
  void learn(Warp& warp, uint32_t most);
  void fence() { ++fences_; }
  // Checks that another instruction may read or write registers that products also use.
  void check_touch(const Op& op, const Warp& warp);

 private:
  // How a register is used.
  struct Use {
    uint32_t as_sum = 0, as_operand = 0;  // by how many pending products
    const Op* op = nullptr;               // the last product that sums into it
    uint64_t touched = 0;                 // number of fences before its last other use
  };
  Use& use(Slot slot);
  void check_registers(const Op& op, const Warp& warp);
  void count_registers(const Op& op, const Warp& warp, int by);

  const size_t num_registers_;
  std::vector<Use> uses_;  // empty until one is needed
  uint64_t begun_ = 0;
  uint64_t fences_ = 0;
  std::vector<std::shared_ptr<Product>> open_;
  std::deque<std::vector<std::shared_ptr<Product>>> committed_;
};

}  // namespace axonn::gpu_machine
