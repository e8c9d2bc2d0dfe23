// Instructions that modify tensor descriptors: tensormap.replace and tensormap.cp_fenceproxy.
// Source: PTX ISA 9.0, sections 9.7.9.28 and 9.7.13.16.
#include <cstring>

#include "gpu_machine/decoder.h"
#include "gpu_machine/lanes.h"
#include "gpu_machine/machine.h"
#include "gpu_machine/tensor_map.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint64_t kMapAlignment = 64;

// An Op's `choice` is the field, `target` the dim, and `b` the value, of 32 or 64 bits. This is a
// weak access to the whole descriptor, through the generic proxy.
void replace(const Op& op, Warp& warp, uint32_t mask) {
  for_each_lane(mask, [&](int i) {
    const Warp::Place at =
        warp.place(warp.address(op, i), kTensorMapBytes, kMapAlignment, i, false);
    if (at.region->read_only) {
      warp.fail(MachineError::Kind::kMemory, "writes what is read-only", i);
    }
    const uint64_t value =
        op.register_bytes == 8 ? warp.lanes<uint64_t>(op.b)[i] : warp.lanes<uint32_t>(op.b)[i];
    warp.note_read(*at.region, at.offset, kTensorMapBytes, {}, i);
    warp.note_write(*at.region, at.offset, kTensorMapBytes, {}, i);
    if (!replace_field(at.region->bytes.data() + at.offset, static_cast<MapField>(op.choice),
                       op.target, value)) {
      warp.fail(MachineError::Kind::kUndefined, "this is no descriptor of a tensor", i);
    }
  });
  warp.machine.note_change();
}

// All lanes do this together: one copy, and one release.
void copy_and_fence(const Op& op, Warp& warp, uint32_t mask) {
  const int first = __builtin_ctz(mask);
  for_each_lane(mask, [&](int i) {
    if (warp.address(op.at, i) == warp.address(op.at, first) &&
        warp.address(op.from, i) == warp.address(op.from, first)) {
      return;
    }
    warp.fail(MachineError::Kind::kUndefined, "its lanes must name the same descriptors", i);
  });
  const auto place = [&](const Address& address) {
    return warp.place(warp.address(address, first), kTensorMapBytes, kMapAlignment, first, false);
  };
  const Warp::Place to = place(op.at), from = place(op.from);
  if (to.cta != nullptr || from.cta == nullptr) {
    warp.fail(MachineError::Kind::kUndefined, "it copies from shared to global memory", first);
  }
  warp.note_read(*from.region, from.offset, kTensorMapBytes, {}, first);
  warp.note_write(*to.region, to.offset, kTensorMapBytes, {}, first);
  std::memcpy(to.region->bytes.data() + to.offset, from.region->bytes.data() + from.offset,
              kTensorMapBytes);
  warp.fence(op.scope);
  warp.machine.note_change();
}

MapField take_field(Decoder& d) {
  const std::string name =
      d.take_one({"global_address", "rank", "box_dim", "global_dim", "global_stride",
                  "element_stride", "elemtype", "swizzle_mode"});
  if (name == "global_address") return MapField::kAddress;
  if (name == "rank") return MapField::kRank;
  if (name == "box_dim") return MapField::kBoxDim;
  if (name == "global_dim") return MapField::kGlobalDim;
  if (name == "global_stride") return MapField::kGlobalStride;
  if (name == "element_stride") return MapField::kElementStride;
  if (name == "elemtype") return MapField::kElementType;
  if (name == "swizzle_mode") return MapField::kSwizzle;
  d.fail("the machine does not replace this field");
}

uint64_t immediate(Decoder& d, size_t index, uint64_t end) {
  const Operand& what = d.operand(index);
  if (what.kind != Operand::Kind::kImmediate || what.bits >= end) {
    d.fail("expected a number below " + std::to_string(end));
  }
  return what.bits;
}

void decode_replace(Decoder& d) {
  Op& op = d.op();
  if (!d.take("tile")) d.fail("the machine knows .tile alone");
  const MapField field = take_field(d);
  op.choice = static_cast<uint8_t>(field);
  const Space space = take_space(d);
  if (!d.take("b1024")) d.fail("expected .b1024");
  const bool is_wide = field == MapField::kAddress || field == MapField::kGlobalStride;
  const Type type = d.take_type();
  if (type.letter != 'b' || type.bits != (is_wide ? 64 : 32)) {
    d.fail(is_wide ? "expected .b64" : "expected .b32");
  }
  op.register_bytes = is_wide ? 8 : 4;
  op.at = d.address(0, space);
  size_t next = 1;
  if (field == MapField::kBoxDim || field == MapField::kGlobalDim ||
      field == MapField::kGlobalStride || field == MapField::kElementStride) {
    const bool has_first = field != MapField::kGlobalStride;  // its stride is the element size
    op.target = static_cast<uint32_t>(
        immediate(d, next++, has_first ? kMostTensorDims : kMostTensorDims - 1));
  }
  if (field == MapField::kElementType && !type_of_ptx(immediate(d, next, 16))) {
    d.fail("the machine does not know this type of elements");
  }
  if (field == MapField::kSwizzle) immediate(d, next, 4);
  op.b = d.slot(next, type);
  op.execute = replace;
}

void decode_copy_and_fence(Decoder& d) {
  Op& op = d.op();
  const bool is_known = d.take("global") && d.take("shared::cta") && d.take("tensormap::generic") &&
                        d.take("release") && d.take("sync") && d.take("aligned");
  if (!is_known) {
    d.fail("expected .global.shared::cta.tensormap::generic.release and a scope, .sync.aligned");
  }
  d.take_order_and_scope();
  if (op.scope == Scope::kNone) d.fail("expected a scope");
  op.at = d.address(0, Space::kGlobal);
  op.from = d.address(1, Space::kShared);
  if (d.operand(2).bits != kTensorMapBytes) d.fail("a descriptor has 128 bytes");
  op.flow = Flow::kMeetAll;
  op.execute = copy_and_fence;
}

}  // namespace

bool decode_tensormap(Decoder& d) {
  if (d.opcode() != "tensormap") return false;
  if (d.take("replace")) {
    decode_replace(d);
  } else if (d.take("cp_fenceproxy")) {
    decode_copy_and_fence(d);
  } else {
    d.fail("the machine does not know this operation on descriptors");
  }
  return true;
}

}  // namespace axonn::gpu_machine
