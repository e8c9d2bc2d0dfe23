#include "core/numeric/reduce.h"

#include <algorithm>
#include <type_traits>

// One binary serves every x86-64: the loader picks the widest clone that the processor has. Clones
// need ifunc support, and sanitizers break their resolvers (which run before the runtime is set
// up).
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define AXONN_TARGET_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define AXONN_TARGET_CLONES
#endif

namespace axonn::kernels {
namespace {

// The accumulators of one block stay in L1 while every source streams past once.
constexpr int64_t kBlock = 1024;

template <typename T>
struct Accumulator {
  using type = T;
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};

template <>
struct Accumulator<BFloat16> {
  using type = float;
  static float load(BFloat16 value) { return value.to_float(); }
  static BFloat16 store(float value) { return BFloat16::from_float(value); }
};

template <>
struct Accumulator<Float16> {
  using type = float;
  static float load(Float16 value) { return value.to_float(); }
  static Float16 store(float value) { return Float16::from_float(value); }
};

template <ReduceOp op, typename T>
inline T combine(T a, T b) {
  if constexpr (op == ReduceOp::kSum) {
    if constexpr (std::is_same_v<T, int64_t>) {  // wraps, as in torch; signed overflow would be UB
      return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    }
    return a + b;
  } else {
    return (b > a || b != b) ? b : a;
  }
}

template <typename T, ReduceOp op>
inline __attribute__((always_inline)) void reduce(T* destination, const void* const* sources,
                                                  int64_t num_sources, int64_t count) {
  using Acc = Accumulator<T>;
  typename Acc::type acc[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(sources[0]) + begin;
    for (int64_t i = 0; i < n; ++i) acc[i] = Acc::load(first[i]);
    for (int64_t s = 1; s < num_sources; ++s) {
      const T* source = static_cast<const T*>(sources[s]) + begin;
      for (int64_t i = 0; i < n; ++i) acc[i] = combine<op>(acc[i], Acc::load(source[i]));
    }
    T* out = destination + begin;
    for (int64_t i = 0; i < n; ++i) out[i] = Acc::store(acc[i]);
  }
}

#define AXONN_DEFINE_REDUCE(name, T)                                                         \
  AXONN_TARGET_CLONES void name##_sum(void* d, const void* const* s, int64_t k, int64_t n) { \
    reduce<T, ReduceOp::kSum>(static_cast<T*>(d), s, k, n);                                  \
  }                                                                                          \
  AXONN_TARGET_CLONES void name##_max(void* d, const void* const* s, int64_t k, int64_t n) { \
    reduce<T, ReduceOp::kMax>(static_cast<T*>(d), s, k, n);                                  \
  }

AXONN_DEFINE_REDUCE(float32, float)
AXONN_DEFINE_REDUCE(float64, double)
AXONN_DEFINE_REDUCE(bfloat16, BFloat16)
AXONN_DEFINE_REDUCE(float16, Float16)
AXONN_DEFINE_REDUCE(int64, int64_t)
#undef AXONN_DEFINE_REDUCE

}  // namespace

void reduce_slots(void* destination, const void* const* sources, int64_t num_sources, int64_t count,
                  DataType dtype, ReduceOp op) {
  const bool sum = op == ReduceOp::kSum;
  switch (dtype) {
    case DataType::kFloat32:
      return (sum ? float32_sum : float32_max)(destination, sources, num_sources, count);
    case DataType::kFloat64:
      return (sum ? float64_sum : float64_max)(destination, sources, num_sources, count);
    case DataType::kBFloat16:
      return (sum ? bfloat16_sum : bfloat16_max)(destination, sources, num_sources, count);
    case DataType::kInt64:
      return (sum ? int64_sum : int64_max)(destination, sources, num_sources, count);
    case DataType::kFloat16:
      return (sum ? float16_sum : float16_max)(destination, sources, num_sources, count);
  }
}

}  // namespace axonn::kernels
