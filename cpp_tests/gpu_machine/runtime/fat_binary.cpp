#include "gpu_machine/runtime/fat_binary.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace axonn::gpu_machine {
namespace {

// The header of a fat binary, and the header of each image in it.
struct Header {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t image_bytes;
};
struct Image {
  uint16_t kind, version;
  uint32_t header_bytes;
  uint64_t bytes;
};
constexpr uint32_t kMagic = 0xBA55ED50;
constexpr uint16_t kPtx = 1;

// What nvcc's code passes to register a fat binary.
struct Wrapper {
  uint32_t magic, version;
  const void* data;
  const void* unused;
};

Registered& registry() {
  static Registered all;
  return all;
}

template <typename T>
T read(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

}  // namespace

const Registered& registered() { return registry(); }

const Module& module_of(const void* fat_binary) {
  static std::map<const void*, Module> parsed;
  const auto found = parsed.find(fat_binary);
  if (found != parsed.end()) return found->second;
  return parsed.emplace(fat_binary, parse_ptx(ptx_of(fat_binary))).first->second;
}

std::string_view ptx_of(const void* fat_binary) {
  const auto* at = static_cast<const char*>(fat_binary);
  const auto header = read<Header>(at);
  if (header.magic != kMagic) throw std::runtime_error("this is no fat binary");
  at += header.header_bytes;
  for (const char* end = at + header.image_bytes; at < end;) {
    const auto image = read<Image>(at);
    if (image.kind == kPtx) {
      const std::string_view text(at + image.header_bytes, image.bytes);
      if (text.find(".version") == text.npos) {
        throw std::runtime_error("the PTX is compressed; build with nvcc --no-compress");
      }
      return text.substr(0, text.find('\0'));
    }
    at += image.header_bytes + image.bytes;
  }
  throw std::runtime_error("the fat binary has no PTX; build with code=compute_90");
}

}  // namespace axonn::gpu_machine

extern "C" {

// A handle is the pointer that nvcc's code passes.
void** __cudaRegisterFatBinary(void* wrapper) { return static_cast<void**>(wrapper); }
void __cudaRegisterFatBinaryEnd(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void** module, const char* host, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  const auto* wrapper = reinterpret_cast<const axonn::gpu_machine::Wrapper*>(module);
  axonn::gpu_machine::registry().functions[host] = {wrapper->data, name};
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

}  // extern "C"
