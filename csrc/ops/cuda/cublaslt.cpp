// Computes products with single algorithms of cuBLASLt, for ops/tuning/product.h. torch runs the
// algorithm that cuBLASLt's heuristic ranks first; a lower-ranked one may be faster when it is
// measured.
//
// An algorithm is named by its configuration, and is looked up by that name in the heuristic's list
// for the operands at hand. Nothing is rebuilt from the numbers in the name, and a name that
// another version of the library does not have is not found. The list is requested once per kind of
// operands.
#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cublasLt.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "core/gemm/product_variant.h"
#include "ops/tuning/product_kernels.h"

namespace axonn::ops::cuda {
namespace {

constexpr auto kOp = "_mm_cublaslt";

// The first kOffered algorithms of the heuristic's list are measured, and a name is looked up among
// the first kListed. Operands whose leading dimensions differ from the measured ones have the same
// algorithms in another order.
constexpr int kOffered = 6;
constexpr int kListed = 32;

// The largest alignment that torch reports to the heuristic.
constexpr uint32_t kMaxAlignment = 256;

void check(cublasStatus_t status, const char* what) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, kOp, ": ", what, ": ", cublasLtGetStatusName(status),
              ": ", cublasLtGetStatusString(status));
}

#define AXONN_CUBLASLT_CHECK(expr) check((expr), #expr)

// A matrix in memory whose rows, or columns if transposed, are contiguous.
struct Stored {
  bool transposed;
  int64_t leading;
};

std::optional<Stored> stored(const at::Tensor& t) {
  const auto pitch = [](const at::Tensor& m) -> std::optional<int64_t> {
    const int64_t leading = m.size(0) == 1 ? m.size(1) : m.stride(0);
    const bool fits = (m.size(1) == 1 || m.stride(1) == 1) && leading >= m.size(1);
    return fits ? std::optional(leading) : std::nullopt;
  };
  if (const auto leading = pitch(t)) return Stored{false, *leading};
  if (const auto leading = pitch(t.t())) return Stored{true, *leading};
  return std::nullopt;
}

uint32_t alignment_of(const at::Tensor& t) {
  const auto address = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  return static_cast<uint32_t>(std::min<uintptr_t>(address & (~address + 1), kMaxAlignment));
}

// Everything that determines which algorithms exist. The row-major a [M, K] @ b [K, N] is the
// column-major (b.t() @ a.t()), so cuBLAS's A is b and its B is a.
struct Problem {
  int64_t m, n, k;
  cudaDataType_t dtype;
  cublasComputeType_t compute;
  bool split_k;
  Stored a, b;
  uint32_t a_alignment, b_alignment, bias_alignment;  // bytes; 0: no bias
  c10::DeviceIndex device;

  using Key = std::array<int64_t, 14>;
  Key key() const {
    return {m,
            n,
            k,
            dtype,
            compute,
            split_k,
            a.transposed,
            a.leading,
            b.transposed,
            b.leading,
            a_alignment,
            b_alignment,
            bias_alignment,
            device};
  }
};

bool may_split_k(at::ScalarType dtype) {
  const auto& context = at::globalContext();
  constexpr auto kNever = at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK;
  if (dtype == at::kBFloat16) return context.allowBF16ReductionCuBLAS() != kNever;
  if (dtype == at::kHalf) return context.allowFP16ReductionCuBLAS() != kNever;
  return true;
}

// Returns nothing for unsupported products: other dtypes, empty operands, a bias with gaps, or a
// matrix with gaps in both its rows and its columns.
std::optional<Problem> problem_of(const at::Tensor& a, const at::Tensor& b,
                                  const std::optional<at::Tensor>& bias) {
  const auto dtype = a.scalar_type();
  const bool is_float = dtype == at::kFloat;
  if (!is_float && dtype != at::kBFloat16 && dtype != at::kHalf) return std::nullopt;
  if (a.numel() == 0 || b.numel() == 0 || (bias && !bias->is_contiguous())) return std::nullopt;
  const auto stored_a = stored(a), stored_b = stored(b);
  if (!stored_a || !stored_b) return std::nullopt;
  const auto precision =
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  const bool tf32 = is_float && precision == at::Float32Precision::TF32;
  return Problem{.m = a.size(0),
                 .n = b.size(1),
                 .k = a.size(1),
                 .dtype = is_float             ? CUDA_R_32F
                          : dtype == at::kHalf ? CUDA_R_16F
                                               : CUDA_R_16BF,
                 .compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                 .split_k = may_split_k(dtype),
                 .a = *stored_a,
                 .b = *stored_b,
                 .a_alignment = alignment_of(a),
                 .b_alignment = alignment_of(b),
                 .bias_alignment = bias ? alignment_of(*bias) : 0,
                 .device = a.device().index()};
}

// cuBLASLt's descriptors of a problem. They live on the stack, as its *Init functions allow, and
// own nothing. Each call needs its own, because they contain the address of the bias.
class Descriptors {
 public:
  Descriptors(const Problem& p, const void* bias) {
    AXONN_CUBLASLT_CHECK(cublasLtMatmulDescInit(&operation, p.compute, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (p.bias_alignment != 0) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    }
    init(a, p.dtype, p.n, p.k, p.b);
    init(b, p.dtype, p.k, p.m, p.a);
    init(d, p.dtype, p.n, p.m, {false, p.n});
  }

  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t a, b, d;

 private:
  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    AXONN_CUBLASLT_CHECK(
        cublasLtMatmulDescSetAttribute(&operation, attribute, &value, sizeof(value)));
  }

  // Describes a column-major matrix; `rows` and `columns` are its sizes after it is transposed.
  static void init(cublasLtMatrixLayoutOpaque_t& layout, cudaDataType_t dtype, int64_t rows,
                   int64_t columns, const Stored& matrix) {
    if (matrix.transposed) std::swap(rows, columns);
    AXONN_CUBLASLT_CHECK(cublasLtMatrixLayoutInit(&layout, dtype, static_cast<uint64_t>(rows),
                                                  static_cast<uint64_t>(columns), matrix.leading));
  }
};

struct Algorithm {
  std::string name;
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace_bytes;
};

// Returns 0 if the algorithm has no such attribute.
template <typename T>
int32_t attribute(const cublasLtMatmulAlgo_t& algorithm,
                  cublasLtMatmulAlgoConfigAttributes_t name) {
  T value{};
  size_t written = 0;
  const auto status =
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, name, &value, sizeof(value), &written);
  return status == CUBLAS_STATUS_SUCCESS ? static_cast<int32_t>(value) : 0;
}

std::string name_of(const cublasLtMatmulAlgo_t& algorithm) {
  return tuning::to_text(tuning::CublasLtConfig{
      .id = attribute<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_ID),
      .tile = attribute<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID),
      .stages = attribute<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID),
      .split_k = attribute<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
      .reduction = attribute<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME),
      .swizzle = attribute<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),
      .custom = attribute<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
      .inner_shape = attribute<uint16_t>(algorithm, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID),
      .cluster_shape = attribute<uint16_t>(algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID)});
}

class Preference {
 public:
  explicit Preference(const Problem& p) {
    AXONN_CUBLASLT_CHECK(cublasLtMatmulPreferenceInit(&preference));
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        static_cast<uint64_t>(at::cuda::getCUDABlasLtWorkspaceSize()));
    // The parts of a split K are added in fp32, whatever torch allows for its own products.
    const uint32_t reductions =
        CUBLASLT_REDUCTION_SCHEME_NONE | (p.split_k ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : 0);
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.b_alignment);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.a_alignment);
    // Torch's allocator aligns memory to more than this.
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, kMaxAlignment);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, kMaxAlignment);
  }

  cublasLtMatmulPreferenceOpaque_t preference;

 private:
  template <typename T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
    AXONN_CUBLASLT_CHECK(
        cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)));
  }
};

// Returns the heuristic's list, which begins with the fastest algorithm by its model. If a name
// appears twice, the first one is kept.
std::vector<Algorithm> ask_heuristic(const Problem& p, const void* bias) {
  Descriptors descriptors(p, bias);
  Preference preference(p);
  std::array<cublasLtMatmulHeuristicResult_t, kListed> results{};
  int count = 0;
  const auto status =
      cublasLtMatmulAlgoGetHeuristic(at::cuda::getCurrentCUDABlasLtHandle(), &descriptors.operation,
                                     &descriptors.a, &descriptors.b, &descriptors.d, &descriptors.d,
                                     &preference.preference, kListed, results.data(), &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {};
  check(status, "cublasLtMatmulAlgoGetHeuristic");
  std::vector<Algorithm> list;
  for (int i = 0; i < count; ++i) {
    const auto& result = results[static_cast<size_t>(i)];
    if (result.state != CUBLAS_STATUS_SUCCESS) continue;
    auto name = name_of(result.algo);
    const bool is_new = std::none_of(list.begin(), list.end(),
                                     [&](const Algorithm& other) { return other.name == name; });
    if (is_new) list.push_back({std::move(name), result.algo, result.workspaceSize});
  }
  return list;
}

// Keeps one list for each kind of operands, forever, so that references to a list stay valid.
class Lists {
 public:
  const std::vector<Algorithm>& get(const Problem& p, const void* bias) {
    const auto key = p.key();
    const std::lock_guard lock(mutex_);
    const auto found = lists_.find(key);
    if (found != lists_.end()) return found->second;
    return lists_.emplace(key, ask_heuristic(p, bias)).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<Problem::Key, std::vector<Algorithm>> lists_;
};

Lists& lists() {
  static Lists instance;
  return instance;
}

const void* address_of(const std::optional<at::Tensor>& bias) {
  return bias ? bias->const_data_ptr() : nullptr;
}

std::vector<std::string> candidates(const at::Tensor& a, const at::Tensor& b,
                                    const std::optional<at::Tensor>& bias) {
  const auto problem = problem_of(a, b, bias);
  if (!problem) return {};
  const c10::cuda::CUDAGuard guard(a.device());
  std::vector<std::string> answer{std::to_string(cublasLtGetVersion())};
  for (const auto& algorithm : lists().get(*problem, address_of(bias))) {
    if (answer.size() <= kOffered) answer.push_back(algorithm.name);
  }
  return answer;
}

std::vector<at::Tensor> mm_cublaslt(const at::Tensor& a, const at::Tensor& b,
                                    const std::optional<at::Tensor>& bias,
                                    const std::string& name) {
  const auto problem = problem_of(a, b, bias);
  if (!problem) return {};
  const c10::cuda::CUDAGuard guard(a.device());
  const auto& list = lists().get(*problem, address_of(bias));
  const auto found =
      std::find_if(list.begin(), list.end(), [&](const auto& other) { return other.name == name; });
  if (found == list.end()) return {};

  auto output = at::empty({problem->m, problem->n}, a.options());
  // This memory belongs to the current stream, or to the graph's pool during a capture. So it may
  // be freed as soon as the call is enqueued.
  const auto workspace =
      at::empty({static_cast<int64_t>(found->workspace_bytes)}, a.options().dtype(at::kByte));
  Descriptors descriptors(*problem, address_of(bias));
  const float one = 1, zero = 0;
  AXONN_CUBLASLT_CHECK(
      cublasLtMatmul(at::cuda::getCurrentCUDABlasLtHandle(), &descriptors.operation, &one,
                     b.const_data_ptr(), &descriptors.a, a.const_data_ptr(), &descriptors.b, &zero,
                     output.const_data_ptr(), &descriptors.d, output.mutable_data_ptr(),
                     &descriptors.d, &found->algorithm, workspace.mutable_data_ptr(),
                     found->workspace_bytes, c10::cuda::getCurrentCUDAStream().stream()));
  return {output};
}

static_assert(std::is_same_v<decltype(candidates), KernelCandidates>);
static_assert(std::is_same_v<decltype(mm_cublaslt), KernelProduct>);

TORCH_LIBRARY_IMPL(axonn, CUDA, m) {
  m.impl("_mm_cublaslt_candidates", &candidates);
  m.impl("_mm_cublaslt", &mm_cublaslt);
}

}  // namespace
}  // namespace axonn::ops::cuda
