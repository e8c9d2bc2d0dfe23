// The products of warpgroups (wgmma): four warps begin one together, and it reads its operands and
// writes its accumulators between its beginning and the wait for it. Source: PTX ISA 9.0, section
// 9.7.15.
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

// What the lanes of a warp gave an instruction; equal for all warps of the group.
struct ProductOperands {
  const Op* op = nullptr;
  uint64_t a = 0, b = 0;  // descriptors; a is 0 if A is in registers
  bool adds = false;      // to the accumulators, which otherwise are not read

  bool operator==(const ProductOperands&) const = default;
};

// A product that some of the four warps have begun. It is under way when all have.
struct Product {
  ProductOperands operands;
  std::array<Warp*, kWarpsOfGroup> warps{};
  Clock seen;  // by all of the warps that have begun it
  int begun = 0;
  std::shared_ptr<ProductOperation> operation;

  bool has_ended() const;
};

// The products of four warps, which they begin in the same order.
class Warpgroup {
 public:
  // The warp begins its next product, which is the group's product number `number`.
  std::shared_ptr<Product> begin(Warp& warp, uint64_t number, const ProductOperands& operands);

 private:
  std::deque<std::shared_ptr<Product>> incomplete_;
  uint64_t complete_ = 0;  // products that all warps have begun
  std::shared_ptr<const AsyncOperation> last_;
};

// What a warp knows of its products: the groups that it waits for, and which registers they use.
class Products {
 public:
  // For registers of so many bytes.
  explicit Products(uint32_t register_bytes);

  void begin(const Op& op, Warp& warp);
  void commit();
  bool have_ended(uint32_t most) const;
  void learn(Warp& warp, uint32_t most);
  void fence() { ++fences_; }
  // Another instruction reads or writes a register that products use, too.
  void check_touch(const Op& op, const Warp& warp);

 private:
  // Of a register.
  struct Use {
    uint32_t as_sum = 0, as_operand = 0;  // by products under way
    const Op* op = nullptr;               // of the last one that has it as a sum
    uint64_t touched = 0;                 // how many fences there had been when another used it
  };
  Use& use(Slot slot);
  void check_registers(const Op& op, const Warp& warp);
  void count_registers(const Op& op, const Warp& warp, int by);

  const size_t num_registers_;
  std::vector<Use> uses_;  // empty before the first is needed
  uint64_t begun_ = 0;
  uint64_t fences_ = 0;
  std::vector<std::shared_ptr<Product>> open_;
  std::deque<std::vector<std::shared_ptr<Product>>> committed_;
};

}  // namespace axonn::gpu_machine
