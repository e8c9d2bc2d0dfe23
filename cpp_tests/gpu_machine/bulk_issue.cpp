#include "gpu_machine/bulk_issue.h"

#include "gpu_machine/bulk.h"
#include "gpu_machine/lanes.h"
#include "gpu_machine/machine.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint32_t kBulkAlignment = 16, kBoxAlignment = 128, kMapAlignment = 64;
constexpr uint32_t kBulkRow = 128;  // bytes that are copied together

// Reads a descriptor through the tensormap proxy.
class DescriptorReader final : public Agent {
 public:
  DescriptorReader(Warp& warp, int lane)
      : Agent(warp.machine, warp.actor, warp.clock, Proxy::kTensormap, warp.time()),
        warp_(warp),
        lane_(lane) {}
  [[noreturn]] void fail(MachineError::Kind kind, const std::string& what, int) const override {
    warp_.fail(kind, what, lane_);
  }

 private:
  Warp& warp_;
  int lane_;
};

TensorMap read_map(Warp& warp, const Address& from, int lane) {
  const Warp::Place at = warp.place(warp.address(from, lane), kTensorMapBytes, kMapAlignment, lane);
  DescriptorReader(warp, lane).note_read(*at.region, at.offset, kTensorMapBytes, {}, -1);
  const auto map = decode_tensor_map(at.region->bytes.data() + at.offset);
  if (!map) warp.fail(MachineError::Kind::kUndefined, "this is no descriptor of a tensor", lane);
  return *map;
}

Rows rows_of_tensor(const Op& op, Warp& warp, const TensorMap& map, int lane) {
  if (map.rank != op.count) {
    warp.fail(MachineError::Kind::kUndefined,
              "the descriptor is of a tensor of " + std::to_string(map.rank) + " dims", lane);
  }
  std::array<int32_t, kMostTensorDims> at{};
  for (uint32_t i = 0; i < map.rank; ++i) at[i] = warp.lanes<int32_t>(op.vector[i])[lane];
  Rows rows;
  rows.row_bytes = map.box[0] * size_of(map.type);
  rows.total_bytes = map.box_bytes();
  for (const BoxRow& row : rows_of_box(map, at)) {
    FarRow far{nullptr, 0, row, 0};
    if (row.inside != 0) {
      const Warp::Place place = warp.place(row.address, row.inside, 1, lane);
      if (place.cta != nullptr) {
        warp.fail(MachineError::Kind::kUndefined, "a tensor lies in global memory", lane);
      }
      far.region = place.region;
      far.offset = place.offset;
      far.alias = place.alias;
    }
    rows.far.push_back(far);
  }
  return rows;
}

// Contiguous bytes.
Rows rows_of_bytes(const Warp::Place& at, uint64_t bytes) {
  Rows rows;
  rows.row_bytes = kBulkRow;
  rows.total_bytes = bytes;
  for (uint64_t done = 0; done < bytes; done += kBulkRow) {
    const auto part = static_cast<uint32_t>(std::min<uint64_t>(kBulkRow, bytes - done));
    rows.far.push_back(
        {at.region, at.offset + done, {0, 0, part, static_cast<uint32_t>(done)}, at.alias});
  }
  return rows;
}

uint64_t bytes_of_copy(const Op& op, Warp& warp, int lane) {
  const uint32_t bytes = warp.lanes<uint32_t>(op.b)[lane];
  if (bytes % kBulkAlignment != 0) {
    warp.fail(MachineError::Kind::kUndefined,
              "a bulk copy takes a multiple of 16 bytes, got " + std::to_string(bytes), lane);
  }
  return bytes;
}

Reduction reduction_of(const Op& op, Warp& warp, const TensorMap* map, int lane) {
  if ((op.choice & kReduces) == 0) return {};
  const auto update = static_cast<Update>(op.register_bytes);
  if (map == nullptr) return {update, static_cast<TensorType>(op.source_bytes)};
  if (!is_supported({update, map->type})) {
    warp.fail(MachineError::Kind::kUndefined, "there is no such reduction of the tensor's type",
              lane);
  }
  return {update, map->type};
}

// A place in shared memory, in the CTA that the address names.
Warp::Place shared_place(Warp& warp, const Address& address, uint64_t bytes, uint64_t alignment,
                         int lane) {
  const Warp::Place at =
      warp.place(warp.address(address, lane), bytes, alignment, lane, address.reaches_cluster);
  if (at.cta == nullptr) {
    warp.fail(MachineError::Kind::kUndefined, "expected an address in shared memory", lane);
  }
  return at;
}

void begin_loads(const Op& op, Warp& warp, int lane) {
  Rows rows;
  TensorMap map;
  const Cta* source = nullptr;
  const bool is_tensor = (op.choice & kTensor) != 0;
  if (is_tensor) {
    map = read_map(warp, op.from, lane);
    rows = rows_of_tensor(op, warp, map, lane);
  } else {
    const uint64_t bytes = bytes_of_copy(op, warp, lane);
    const Warp::Place from = warp.place(warp.address(op.from, lane), bytes, kBulkAlignment, lane,
                                        op.from.reaches_cluster);
    if ((from.cta != nullptr) != ((op.choice & kFromShared) != 0)) {
      warp.fail(MachineError::Kind::kUndefined, "the source lies in another kind of memory", lane);
    }
    source = from.cta;
    rows = rows_of_bytes(from, bytes);
  }
  const Warp::Place to =
      shared_place(warp, op.at, rows.total_bytes, is_tensor ? kBoxAlignment : kBulkAlignment, lane);
  const Warp::Place signal = shared_place(warp, op.signal, kMBarrierBytes, kMBarrierBytes, lane);
  if (to.cta != signal.cta) {
    warp.fail(MachineError::Kind::kUndefined,
              "the mbarrier lies in another CTA's shared memory than the target", lane);
  }
  if (rows.total_bytes == 0) return;
  const auto shared_rows = std::make_shared<const Rows>(std::move(rows));
  const Reduction reduction = reduction_of(op, warp, is_tensor ? &map : nullptr, lane);
  const auto begin = [&](Cta& cta) {
    warp.machine.async().begin(std::make_shared<BulkLoad>(
        warp, lane, shared_rows, SharedBox{&cta, to.offset, map.swizzle_bytes}, signal.offset,
        source, reduction));
  };
  if ((op.choice & kMulticast) == 0) return begin(*to.cta);
  const uint32_t ctas = warp.lanes<uint16_t>(op.e)[lane];
  const auto& all = warp.cta.cluster.ctas;
  if (ctas == 0 || ctas >> all.size() != 0) {
    warp.fail(MachineError::Kind::kUndefined,
              "the mask of a multicast names CTAs that the cluster does not have", lane);
  }
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if ((ctas >> rank & 1u) == 0) continue;
    if (all[rank]->has_left) {
      warp.fail(MachineError::Kind::kMemory, "multicasts to a CTA that has left", lane);
    }
    begin(*all[rank]);
  }
}

// Adds the operation to the group of each lane that takes part in it.
void begin_store(const Op& op, Warp& warp, int lane, uint32_t lanes) {
  Rows rows;
  TensorMap map;
  const bool is_tensor = (op.choice & kTensor) != 0;
  if (is_tensor) {
    map = read_map(warp, op.at, lane);
    rows = rows_of_tensor(op, warp, map, lane);
  } else {
    const uint64_t bytes = bytes_of_copy(op, warp, lane);
    const Warp::Place to = warp.place(warp.address(op.at, lane), bytes, kBulkAlignment, lane);
    if (to.cta != nullptr) {
      warp.fail(MachineError::Kind::kUndefined, "the target lies in shared memory", lane);
    }
    rows = rows_of_bytes(to, bytes);
  }
  for (const FarRow& far : rows.far) {
    if (far.region != nullptr && far.region->read_only) {
      warp.fail(MachineError::Kind::kMemory, "writes what is read-only", lane);
    }
  }
  const Warp::Place from = shared_place(warp, op.from, rows.total_bytes,
                                        is_tensor ? kBoxAlignment : kBulkAlignment, lane);
  if (rows.total_bytes == 0) return;
  const auto store = std::make_shared<BulkStore>(
      warp, lane, std::move(rows), SharedBox{from.cta, from.offset, map.swizzle_bytes},
      reduction_of(op, warp, is_tensor ? &map : nullptr, lane));
  for_each_lane(lanes, [&](int i) { warp.bulk_groups(i).add(store); });
  warp.machine.async().begin(store);
}

bool are_equal(const Op& op, Warp& warp, int one, int other) {
  bool equal = warp.address(op.at, one) == warp.address(op.at, other) &&
               warp.address(op.from, one) == warp.address(op.from, other);
  if ((op.choice & kTensor) == 0) {
    const uint32_t* bytes = warp.lanes<uint32_t>(op.b);
    return equal && bytes[one] == bytes[other];
  }
  for (uint32_t i = 0; i < op.count; ++i) {
    const int32_t* at = warp.lanes<int32_t>(op.vector[i]);
    equal &= at[one] == at[other];
  }
  return equal;
}

AsyncStage stage_of(const Op& op) { return op.choice == 1 ? AsyncStage::kRead : AsyncStage::kDone; }

}  // namespace

namespace bulk_issue {

void load(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) { begin_loads(op, warp, i); });
}

// Lanes with identical stores count as one store: CUTLASS's epilogues let a whole warp store each
// tile. Each lane has its own reduction, as PTX defines it, since they would change the result.
void store(const Op& op, Warp& warp, uint32_t mask) {
  while (mask != 0) {
    const int first = __builtin_ctz(mask);
    uint32_t lanes = 1u << first;
    if ((op.choice & kReduces) == 0) {
      for_each_lane(mask, [&](int i) { lanes |= are_equal(op, warp, first, i) ? 1u << i : 0u; });
    }
    begin_store(op, warp, first, lanes);
    mask &= ~lanes;
  }
}

void commit(const Op&, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) { warp.bulk_groups(i).commit(); });
}

bool are_groups_ready(const Op& op, Warp& warp, uint32_t mask) {
  bool ready = true;
  for_each_lane(mask,
                [&](int i) { ready &= warp.bulk_groups(i).have_reached(stage_of(op), op.target); });
  return ready;
}

void learn_of_groups(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) { warp.bulk_groups(i).learn(warp, stage_of(op), op.target); });
}

}  // namespace bulk_issue
}  // namespace axonn::gpu_machine
