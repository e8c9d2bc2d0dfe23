// Bulk copies and reductions, which cp.async.bulk and cp.async.bulk.tensor start. Source: PTX ISA
// 9.0, sections 9.7.9.25 to 9.7.9.28.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gpu_machine/async.h"
#include "gpu_machine/tensor_map.h"
#include "gpu_machine/updates.h"

namespace axonn::gpu_machine {

// How elements are combined with those of the target.
struct Reduction {
  Update update = kExchange;  // a plain copy
  TensorType type = TensorType::kUint8;
};

// Whether PTX has this reduction.
bool is_supported(Reduction reduction);

// The side in shared memory: a whole number of 16-byte units, swizzled.
struct SharedBox {
  Cta* cta = nullptr;
  uint64_t offset = 0;
  uint32_t swizzle_bytes = 0;
};

// Where a row lies on the other side: in global memory, or in another CTA's shared memory.
struct FarRow {
  Region* region = nullptr;  // null if the whole row is outside the tensor
  uint64_t offset = 0;
  BoxRow row;
  uint8_t alias = 0;
};

struct Rows {
  std::vector<FarRow> far;
  uint32_t row_bytes = 0;  // of each; without a tensor, the last row of a copy may be shorter
  uint64_t total_bytes = 0;

  uint32_t bytes_of(size_t index) const {
    return static_cast<uint32_t>(
        std::min<uint64_t>(row_bytes, total_bytes - uint64_t{row_bytes} * index));
  }
};

// Copies to one CTA's shared memory and signals its mbarrier. A multicast is one load per CTA.
class BulkLoad final : public AsyncOperation {
 public:
  BulkLoad(Warp& issuer, int lane, std::shared_ptr<const Rows> rows, const SharedBox& to,
           uint64_t mbarrier, const Cta* source, Reduction reduction);
  void step() override;
  bool uses(const Cta& cta) const override { return &cta == to_.cta || &cta == source_; }

 private:
  uint32_t load_row(size_t index);

  const std::shared_ptr<const Rows> rows_;
  const SharedBox to_;
  const uint64_t mbarrier_;  // its offset in the target's shared memory
  const Cta* source_;        // the CTA whose shared memory is copied; null for global memory
  const Reduction reduction_;
  std::vector<std::pair<size_t, size_t>> pieces_;  // rows still to be copied
};

// Copies from shared memory, as part of a group of the thread.
class BulkStore final : public AsyncOperation {
 public:
  BulkStore(Warp& issuer, int lane, Rows rows, const SharedBox& from, Reduction reduction);
  void step() override;
  bool uses(const Cta& cta) const override { return stage() == Stage::kBegun && &cta == from_.cta; }

 private:
  void read_row(size_t index);
  void write_row(size_t index);

  const Rows rows_;
  const SharedBox from_;
  const Reduction reduction_;
  std::vector<std::byte> bytes_;                   // as they were read
  std::vector<std::pair<size_t, size_t>> pieces_;  // rows still to be copied
};

}  // namespace axonn::gpu_machine
