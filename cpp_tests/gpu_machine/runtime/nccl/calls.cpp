#include "gpu_machine/runtime/nccl/calls.h"

#include <numeric>

namespace axonn::gpu_machine::nccl {
namespace {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kBroadcast:
      return "broadcast";
    case Kind::kReduce:
      return "reduce";
    case Kind::kAllToAll:
      return "all_to_all";
    case Kind::kSend:
      return "send";
    case Kind::kReceive:
      return "receive";
  }
  return "?";
}

const char* name_of(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt8:
      return "int8";
    case ncclUint8:
      return "uint8";
    case ncclInt32:
      return "int32";
    case ncclUint32:
      return "uint32";
    case ncclInt64:
      return "int64";
    case ncclUint64:
      return "uint64";
    case ncclFloat16:
      return "float16";
    case ncclFloat32:
      return "float32";
    case ncclFloat64:
      return "float64";
    case ncclBfloat16:
      return "bfloat16";
    default:
      return "?";
  }
}

const char* name_of(ncclRedOp_t op) {
  switch (op) {
    case ncclSum:
      return "sum";
    case ncclProd:
      return "product";
    case ncclMax:
      return "max";
    case ncclMin:
      return "min";
    case ncclAvg:
      return "average";
    default:
      return "?";
  }
}

}  // namespace

int64_t size_of(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

std::string describe(const Call& call) {
  std::string text = name_of(call.kind);
  if (call.is_sum()) text += std::string("(") + name_of(call.op) + ")";
  text += " of " + std::to_string(call.count) + " " + name_of(call.dtype);
  if (call.kind == Kind::kSend) return text + " to rank " + std::to_string(call.peer);
  if (call.kind == Kind::kReceive) return text + " from rank " + std::to_string(call.peer);
  if (call.peer >= 0) text += " with root " + std::to_string(call.peer);
  return text;
}

bool agree(const Call& one, const Call& other) {
  return one.kind == other.kind && one.count == other.count && one.dtype == other.dtype &&
         one.peer == other.peer && (!one.is_sum() || one.op == other.op);
}

std::vector<Block> blocks_of(const Call& call, int rank, int num_ranks) {
  std::vector<int> all(static_cast<size_t>(num_ranks));
  std::iota(all.begin(), all.end(), 0);
  const int64_t count = call.count;
  std::vector<Block> blocks;
  switch (call.kind) {
    case Kind::kAllReduce:
      return {{all, all}};
    case Kind::kBroadcast:
      return {{{call.peer}, all}};
    case Kind::kReduce:
      return {{all, {call.peer}}};
    case Kind::kSend:
      return {{{rank}, {call.peer}}};
    case Kind::kReceive:
      return {{{call.peer}, {rank}}};
    case Kind::kAllGather:
      for (const int from : all) blocks.push_back({{from}, all, 0, from * count});
      return blocks;
    case Kind::kReduceScatter:
      for (const int to : all) blocks.push_back({all, {to}, to * count, 0});
      return blocks;
    case Kind::kAllToAll:
      for (const int from : all) {
        for (const int to : all) blocks.push_back({{from}, {to}, to * count, from * count});
      }
      return blocks;
  }
  return blocks;
}

}  // namespace axonn::gpu_machine::nccl
