#include "gpu_machine/bulk.h"

#include <cstring>

#include "gpu_machine/machine.h"
#include "gpu_machine/narrow_float.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint32_t kUnit = 16;  // bytes that a swizzle moves as one unit
constexpr size_t kMostCuts = 2;

// Cuts the rows into up to three pieces, in any order.
std::vector<std::pair<size_t, size_t>> cut(Machine& machine, size_t rows) {
  std::vector<size_t> cuts{0, rows};
  for (size_t i = machine.draw(kMostCuts + 1); i > 0; --i) {
    cuts.push_back(machine.draw(static_cast<uint32_t>(rows)));
  }
  std::sort(cuts.begin(), cuts.end());
  std::vector<std::pair<size_t, size_t>> pieces;
  for (size_t i = 1; i < cuts.size(); ++i) {
    if (cuts[i] > cuts[i - 1]) pieces.emplace_back(cuts[i - 1], cuts[i]);
  }
  for (size_t i = pieces.size(); i > 1; --i) {
    std::swap(pieces[i - 1], pieces[machine.draw(static_cast<uint32_t>(i))]);
  }
  return pieces;
}

// Calls visit(offset in shared memory, offset in the row, bytes) for each contiguous part of a
// row.
template <typename Visit>
void for_each_part(const SharedBox& box, uint64_t row, uint32_t begin, uint32_t bytes,
                   const Visit& visit) {
  if (box.swizzle_bytes == 0) return visit(box.offset + row + begin, begin, bytes);
  for (uint32_t done = 0; done < bytes;) {
    const uint32_t place = begin + done;
    const uint32_t part = std::min(bytes - done, kUnit - place % kUnit);
    visit(swizzled(box.offset + row + place, box.swizzle_bytes), place, part);
    done += part;
  }
}

// Whether a row of this size fills a swizzle line, so that its units stay within the row.
bool fills_its_line(const SharedBox& box, uint32_t bytes) {
  return box.swizzle_bytes == 0 || bytes == box.swizzle_bytes;
}

template <typename T>
void join(Update update, std::byte* target, const std::byte* source, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += sizeof(T)) {
    T old, value;
    std::memcpy(&old, target + i, sizeof(T));
    std::memcpy(&value, source + i, sizeof(T));
    if constexpr (std::is_arithmetic_v<T>) {
      old = updated<T>(update, old, value, T{});
    } else {
      const double a = old.wide(), b = value.wide();
      old = narrow<T>(update == kAdd ? a + b : update == kMin ? std::min(a, b) : std::max(a, b));
    }
    std::memcpy(target + i, &old, sizeof(T));
  }
}

void join(Reduction reduction, std::byte* target, const std::byte* source, uint32_t bytes) {
  const Update update = reduction.update;
  switch (reduction.type) {
    case TensorType::kUint8:
    case TensorType::kUint16:
      return;  // unsupported
    case TensorType::kUint32:
      return join<uint32_t>(update, target, source, bytes);
    case TensorType::kInt32:
      return join<int32_t>(update, target, source, bytes);
    case TensorType::kUint64:
      return join<uint64_t>(update, target, source, bytes);
    case TensorType::kInt64:
      return join<int64_t>(update, target, source, bytes);
    case TensorType::kFloat16:
      return join<Half>(update, target, source, bytes);
    case TensorType::kFloat32:
      return join<float>(update, target, source, bytes);
    case TensorType::kFloat64:
      return join<double>(update, target, source, bytes);
    case TensorType::kBFloat16:
      return join<Brain>(update, target, source, bytes);
  }
}

void write(Agent& who, Reduction reduction, Region& region, uint64_t offset, uint8_t alias,
           const std::byte* source, uint32_t bytes) {
  std::byte* target = region.bytes.data() + offset;
  if (reduction.update == kExchange) {
    who.note_write(region, offset, bytes, {Order::kWeak, Scope::kNone, alias}, -1);
    std::memcpy(target, source, bytes);
  } else {
    who.note_update(region, offset, bytes, {Order::kRelaxed, Scope::kGpu, alias}, -1);
    join(reduction, target, source, bytes);
  }
}

}  // namespace

bool is_supported(Reduction reduction) {
  const Update update = reduction.update;
  const bool compares = update == kMin || update == kMax;
  switch (reduction.type) {
    case TensorType::kUint8:
    case TensorType::kUint16:
      return false;
    case TensorType::kFloat16:
    case TensorType::kBFloat16:
      return update == kAdd || compares;
    case TensorType::kFloat32:
    case TensorType::kFloat64:
      return update == kAdd;
    case TensorType::kInt32:
    case TensorType::kInt64:
      return update == kAdd || compares;
    case TensorType::kUint32:
      return true;
    case TensorType::kUint64:
      return update != kIncrement && update != kDecrement;
  }
  return false;
}

BulkLoad::BulkLoad(Warp& issuer, int lane, std::shared_ptr<const Rows> rows, const SharedBox& to,
                   uint64_t mbarrier, const Cta* source, Reduction reduction)
    : AsyncOperation(issuer, lane, Proxy::kAsync, {static_cast<uint64_t>(to.cta->id), mbarrier}),
      rows_(std::move(rows)),
      to_(to),
      mbarrier_(mbarrier),
      source_(source),
      reduction_(reduction),
      pieces_(cut(machine, rows_->far.size())) {}

void BulkLoad::step() {
  const auto found = to_.cta->mbarriers.find(mbarrier_);
  if (found == to_.cta->mbarriers.end()) {
    fail(MachineError::Kind::kUndefined,
         "signals where there is no mbarrier, at shared memory + " + std::to_string(mbarrier_));
  }
  found->second.check_initialized(*this, false, -1);
  const auto [begin, end] = pieces_.back();
  pieces_.pop_back();
  int64_t bytes = 0;
  for (size_t i = begin; i < end; ++i) bytes += load_row(i);
  if (pieces_.empty()) reach(Stage::kDone);
  found->second.complete(*this, bytes, snapshot());
}

uint32_t BulkLoad::load_row(size_t index) {
  const FarRow& far = rows_->far[index];
  const uint32_t bytes = rows_->bytes_of(index);
  std::vector<std::byte> row(bytes);  // zero outside the tensor
  if (far.row.inside != 0) {
    note_read(*far.region, far.offset, far.row.inside, {Order::kWeak, Scope::kNone, far.alias}, -1);
    std::memcpy(row.data() + far.row.skipped, far.region->bytes.data() + far.offset,
                far.row.inside);
  }
  Region& shared = to_.cta->shared;
  if (reduction_.update == kExchange && fills_its_line(to_, bytes)) {
    note_write(shared, to_.offset + far.row.shared, bytes, {}, -1);
    for_each_part(to_, far.row.shared, 0, bytes, [&](uint64_t to, uint32_t place, uint32_t part) {
      std::memcpy(shared.bytes.data() + to, row.data() + place, part);
    });
    return bytes;
  }
  for_each_part(to_, far.row.shared, 0, bytes, [&](uint64_t to, uint32_t place, uint32_t part) {
    write(*this, reduction_, shared, to, 0, row.data() + place, part);
  });
  return bytes;
}

BulkStore::BulkStore(Warp& issuer, int lane, Rows rows, const SharedBox& from, Reduction reduction)
    : AsyncOperation(issuer, lane, Proxy::kAsync,
                     {issuer.actor.id, uint64_t{1} << 32 | static_cast<uint32_t>(lane)}),
      rows_(std::move(rows)),
      from_(from),
      reduction_(reduction),
      bytes_(rows_.total_bytes),
      pieces_(cut(machine, rows_.far.size())) {}

void BulkStore::step() {
  if (pieces_.empty()) return reach(Stage::kDone);  // no row has bytes
  const auto [begin, end] = pieces_.back();
  pieces_.pop_back();
  const bool reads = stage() == Stage::kBegun;
  for (size_t i = begin; i < end; ++i) reads ? read_row(i) : write_row(i);
  if (!pieces_.empty()) return;
  if (reads) pieces_ = cut(machine, rows_.far.size());
  reach(reads ? Stage::kRead : Stage::kDone);
}

void BulkStore::read_row(size_t index) {
  const FarRow& far = rows_.far[index];
  if (far.row.inside == 0) return;
  const uint32_t bytes = rows_.bytes_of(index);
  Region& shared = from_.cta->shared;
  std::byte* row = bytes_.data() + far.row.shared;
  const bool notes_all = far.row.inside == bytes && fills_its_line(from_, bytes);
  if (notes_all) note_read(shared, from_.offset + far.row.shared, bytes, {}, -1);
  for_each_part(from_, far.row.shared, far.row.skipped, far.row.inside,
                [&](uint64_t from, uint32_t place, uint32_t part) {
                  if (!notes_all) note_read(shared, from, part, {}, -1);
                  std::memcpy(row + place, shared.bytes.data() + from, part);
                });
}

void BulkStore::write_row(size_t index) {
  const FarRow& far = rows_.far[index];
  if (far.row.inside == 0) return;
  write(*this, reduction_, *far.region, far.offset, far.alias,
        bytes_.data() + far.row.shared + far.row.skipped, far.row.inside);
}

}  // namespace axonn::gpu_machine
