// The few functions of cuBLAS and cuBLASLt that csrc/ops/cuda/cublaslt.cpp uses, directly or
// through PyTorch's handle. The heuristic offers a few algorithms that all do the same: add in
// fp32, in the order of K, in a stream.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "core/numeric/data_type.h"

namespace {

using axonn::kernels::BFloat16;
using axonn::kernels::Float16;

constexpr int kAlgorithms = 4;
constexpr size_t kWorkspaceBytes = size_t{1} << 20;  // for algorithms with a split K

// Contents of cuBLASLt's descriptors, whose layout its header leaves open.
struct Operation {
  cublasComputeType_t compute;
  cublasOperation_t transa, transb;
  cublasLtEpilogue_t epilogue;
  const void* bias;
};
struct Layout {
  cudaDataType_t dtype;
  uint64_t rows, columns;
  int64_t leading;
};
struct Preference {
  uint64_t workspace_bytes;
  uint32_t reductions;
};
struct Algorithm {
  int32_t id;
  int32_t split_k;
};

static_assert(sizeof(Operation) <= sizeof(cublasLtMatmulDescOpaque_t));
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t));
static_assert(sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t));
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

template <typename T>
T read(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T>
cublasStatus_t initialize(void* target, size_t size, const T& value) {
  if (size < sizeof value) return CUBLAS_STATUS_INVALID_VALUE;
  std::memset(target, 0, size);
  std::memcpy(target, &value, sizeof value);
  return CUBLAS_STATUS_SUCCESS;
}

template <typename T>
cublasStatus_t put(T& target, const void* value, size_t size) {
  if (size != sizeof target) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&target, value, size);
  return CUBLAS_STATUS_SUCCESS;
}

// --- Products ------------------------------------------------------------------------------------

// A column-major product that a stream has not computed yet.
struct Product {
  Operation operation;
  Layout a, b, d;
  float alpha, beta;
  const void *from_a, *from_b, *from_c;
  void* to;
};

int64_t bytes_of(cudaDataType_t dtype) { return dtype == CUDA_R_32F ? 4 : 2; }

float element(const void* from, int64_t i, cudaDataType_t dtype, bool is_tf32) {
  const auto* at = static_cast<const std::byte*>(from) + i * bytes_of(dtype);
  if (dtype == CUDA_R_16BF) return read<BFloat16>(at).to_float();
  if (dtype == CUDA_R_16F) return read<Float16>(at).to_float();
  const auto bits = read<uint32_t>(at);
  return axonn::kernels::float_of(is_tf32 ? bits & ~0x1FFFu : bits);
}

void store(void* to, int64_t i, cudaDataType_t dtype, float value) {
  auto* at = static_cast<std::byte*>(to) + i * bytes_of(dtype);
  if (dtype == CUDA_R_32F) {
    std::memcpy(at, &value, sizeof value);
    return;
  }
  const uint16_t bits =
      dtype == CUDA_R_16BF ? BFloat16::from_float(value).bits : Float16::from_float(value).bits;
  std::memcpy(at, &bits, sizeof bits);
}

// Returns a matrix as [K, rows or columns of the product].
std::vector<float> by_k(const void* from, const Layout& layout, bool k_is_rows, bool is_tf32) {
  std::vector<float> values(layout.rows * layout.columns);
  const auto rows = static_cast<int64_t>(layout.rows);
  const auto columns = static_cast<int64_t>(layout.columns);
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = k_is_rows ? row * columns + column : column * rows + row;
      values[static_cast<size_t>(at)] =
          element(from, column * layout.leading + row, layout.dtype, is_tf32);
    }
  }
  return values;
}

void compute(const Product& p) {
  const bool is_tf32 = p.operation.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
  const bool transa = p.operation.transa == CUBLAS_OP_T, transb = p.operation.transb == CUBLAS_OP_T;
  const auto a = by_k(p.from_a, p.a, transa, is_tf32), b = by_k(p.from_b, p.b, !transb, is_tf32);
  const auto m = static_cast<int64_t>(p.d.rows), n = static_cast<int64_t>(p.d.columns);
  const auto k = static_cast<int64_t>(transa ? p.a.rows : p.a.columns);
  std::vector<float> sums(p.d.rows);
  for (int64_t column = 0; column < n; ++column) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int64_t i = 0; i < k; ++i) {
      const float factor = b[static_cast<size_t>(i * n + column)];
      const float* from = a.data() + i * m;
      for (int64_t row = 0; row < m; ++row) sums[static_cast<size_t>(row)] += factor * from[row];
    }
    for (int64_t row = 0; row < m; ++row) {
      float value = p.alpha * sums[static_cast<size_t>(row)];
      const int64_t at = column * p.d.leading + row;
      if (p.beta != 0) value += p.beta * element(p.from_c, at, p.d.dtype, false);
      if (p.operation.epilogue == CUBLASLT_EPILOGUE_BIAS) {
        value += element(p.operation.bias, row, p.d.dtype, false);
      }
      store(p.to, at, p.d.dtype, value);
    }
  }
}

// The product is kept, because a graph may compute it again.
void compute_in_stream(void* product) { compute(*static_cast<const Product*>(product)); }

}  // namespace

extern "C" {

// --- cuBLAS: PyTorch's handle --------------------------------------------------------------------

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = reinterpret_cast<cublasHandle_t>(new int);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete reinterpret_cast<int*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }

// --- cuBLASLt ------------------------------------------------------------------------------------

size_t cublasLtGetVersion() { return 1; }
const char* cublasLtGetStatusName(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "a status of cuBLAS";
}
const char* cublasLtGetStatusString(cublasStatus_t status) { return cublasLtGetStatusName(status); }

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t description, size_t size,
                                               cublasComputeType_t compute, cudaDataType_t) {
  return initialize(
      description, size,
      Operation{compute, CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT, nullptr});
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t size) {
  auto& operation = *reinterpret_cast<Operation*>(description);
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return put(operation.transa, value, size);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return put(operation.transb, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return put(operation.epilogue, value, size);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return put(operation.bias, value, size);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}
cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size,
                                                 cudaDataType_t dtype, uint64_t rows,
                                                 uint64_t columns, int64_t leading) {
  return initialize(layout, size, Layout{dtype, rows, columns, leading});
}
cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference,
                                                     size_t size) {
  return initialize(preference, size, Preference{0, ~0u});
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t size) {
  auto& kept = *reinterpret_cast<Preference*>(preference);
  if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) {
    return put(kept.workspace_bytes, value, size);
  }
  if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) {
    return put(kept.reductions, value, size);
  }
  return CUBLAS_STATUS_SUCCESS;  // alignments make no difference here
}

// Every second algorithm splits K, if that is allowed and there is enough workspace.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t* results,
                                              int* count) {
  const auto kept = read<Preference>(preference);
  const bool splits = (kept.reductions & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) != 0 &&
                      kept.workspace_bytes >= kWorkspaceBytes;
  *count = 0;
  for (int id = 0; id < kAlgorithms && *count < wanted; ++id) {
    const bool is_split = id % 2 == 1;
    if (is_split && !splits) continue;
    cublasLtMatmulHeuristicResult_t& result = results[(*count)++];
    result = {};
    const Algorithm algorithm{id + 1, is_split ? 2 : 1};
    std::memcpy(&result.algo, &algorithm, sizeof algorithm);
    result.workspaceSize = is_split ? kWorkspaceBytes : 0;
    result.state = CUBLAS_STATUS_SUCCESS;
  }
  return *count == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algorithm,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    void* value, size_t size, size_t* written) {
  const auto known = read<Algorithm>(algorithm);
  const int32_t number = attribute == CUBLASLT_ALGO_CONFIG_ID           ? known.id
                         : attribute == CUBLASLT_ALGO_CONFIG_SPLITK_NUM ? known.split_k
                                                                        : 0;
  std::memset(value, 0, size);
  std::memcpy(value, &number, std::min(size, sizeof number));
  *written = size;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t operation, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
  auto product = std::make_unique<Product>(
      Product{read<Operation>(operation), read<Layout>(a_layout), read<Layout>(b_layout),
              read<Layout>(d_layout), read<float>(alpha), read<float>(beta), a, b, c, d});
  const cudaError_t error = cudaLaunchHostFunc(stream, &compute_in_stream, product.release());
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // extern "C"
