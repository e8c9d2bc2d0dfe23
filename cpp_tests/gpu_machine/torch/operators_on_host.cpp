// PyTorch's own operators on the GPU in software. PyTorch's libraries hold their kernels as machine
// code, which cannot run here. So every operator with a kernel for both CUDA and CPUs runs the CPU
// kernel on the same memory: the host reaches device memory at its addresses. Operators that only
// copy, allocate or make views stay as they are in PyTorch.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <ATen/cuda/CUDAGraphsUtils.cuh>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// These have kernels for both, but already do the right thing on a device without kernels.
const std::set<std::string> kStay = {"aten::_local_scalar_dense",
                                     "aten::empty",
                                     "aten::empty_strided",
                                     "aten::resize_",
                                     "aten::set_",
                                     "aten::is_set_to"};

c10::DispatchKeySet cpu_keys() { return c10::DispatchKeySet(c10::DispatchKey::CPU); }

void check(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, "CUDA error: ", cudaGetErrorString(error));
}

// --- Arguments -----------------------------------------------------------------------------------

at::Tensor alias_of(const at::Tensor& t) {
  const auto options = t.options().device(at::kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), options);
}

// A CPU generator in place of a CUDA one. As on a GPU, its numbers follow from the seed and the
// offset, which each call advances: setting the seed or a state again repeats the numbers. A graph
// has no offset, so all calls that it captures start from the seed.
at::Generator generator_for(at::Generator of_cuda) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
      status != cudaStreamCaptureStatusNone) {
    return at::detail::createCPUGenerator(of_cuda.current_seed());
  }
  const uint64_t offset = of_cuda.get_offset();
  of_cuda.set_offset(offset + 4);
  return at::detail::createCPUGenerator(of_cuda.current_seed() + 0x9E3779B97F4A7C15u * offset);
}

// The arguments of a call, as the CPU kernel gets them.
class Arguments {
 public:
  struct Pair {
    at::Tensor device, host;
  };

  Arguments(const OperatorHandle& op, const Stack& stack) {
    const size_t count = op.schema().arguments().size();
    for (size_t i = stack.size() - count; i < stack.size(); ++i) host.push_back(convert(stack[i]));
  }

  // The device tensor that a host tensor stands for; undefined if the host tensor is new.
  at::Tensor original(const at::Tensor& of_host) const {
    for (const Pair& pair : pairs) {
      if (pair.host.is_same(of_host)) return pair.device;
    }
    return {};
  }

  Stack host;
  std::vector<Pair> pairs;
  std::set<c10::DeviceIndex> devices;
  c10::Device device{at::kCUDA, 0};  // for new tensors

 private:
  at::Tensor convert(const at::Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return t;
    for (const Pair& pair : pairs) {
      if (pair.device.is_same(t)) return pair.host;
    }
    if (pairs.empty()) device = t.device();
    devices.insert(t.device().index());
    pairs.push_back({t, alias_of(t)});
    return pairs.back().host;
  }

  IValue convert(const IValue& v) {
    if (v.isTensor()) return convert(v.toTensor());
    if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(convert(t));
      return list;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector()) {
        list.push_back(t ? std::optional(convert(*t)) : std::nullopt);
      }
      return list;
    }
    if (v.isDevice() && v.toDevice().is_cuda()) {
      device = v.toDevice();
      return c10::Device(at::kCPU);
    }
    if (v.isGenerator() && v.toGenerator().device().is_cuda()) {
      return generator_for(v.toGenerator());
    }
    return v;
  }
};

// --- Results -------------------------------------------------------------------------------------

void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  if (from.numel() == 0) return;
  const size_t bytes =
      at::detail::computeStorageNbytes(from.sizes(), from.strides(), from.dtype().itemsize());
  std::memcpy(to.data_ptr(), from.data_ptr(), bytes);
}

// Outputs passed by the caller may have been resized.
void follow_size(const Arguments& arguments) {
  for (const auto& [device, host] : arguments.pairs) {
    if (device.sizes() == host.sizes()) continue;
    device.resize_(host.sizes());
    device.as_strided_(host.sizes(), host.strides());
    copy_bytes(device, host);
  }
}

// New host tensors, each with the device tensor that replaces it.
using New = std::vector<std::pair<at::Tensor, at::Tensor>>;

IValue on_device(const IValue& v, const Arguments& arguments, New& made) {
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorVector()) {
      list.push_back(on_device(IValue(t), arguments, made).toTensor());
    }
    return list;
  }
  if (!v.isTensor() || !v.toTensor().defined()) return v;
  const at::Tensor t = v.toTensor();
  if (at::Tensor known = arguments.original(t); known.defined()) return known;
  const auto options = t.options().device(arguments.device);
  const at::Tensor result = at::empty_strided(t.sizes(), t.strides(), options);
  made.emplace_back(t, result);
  return result;
}

// --- Products by tensor cores --------------------------------------------------------------------

// Matrix products, with the number of leading arguments that are added, not multiplied.
const std::map<std::string, size_t> kProducts = {
    {"aten::mm", 0}, {"aten::bmm", 0}, {"aten::addmm", 1}, {"aten::baddbmm", 1}};

// fp32 as tensor cores read it: the last 13 bits are ignored.
at::Tensor as_tf32(const at::Tensor& t) {
  return t.clone().view(at::kInt).bitwise_and_(~0x1fff).view(at::kFloat);
}

// Rounds fp32 operands of products, if PyTorch lets tensor cores do so.
void round_operands(const OperatorHandle& op, Stack& arguments) {
  const auto product = kProducts.find(op.operator_name().name);
  const bool rounds =
      product != kProducts.end() &&
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
          at::Float32Precision::TF32;
  if (!rounds) return;
  const at::AutoDispatchBelowADInplaceOrView guard;
  for (const size_t i : {product->second, product->second + 1}) {
    const at::Tensor t = arguments[i].toTensor();
    if (t.scalar_type() == at::kFloat) arguments[i] = as_tf32(t);
  }
}

// Converts a product's 16-bit operands to fp32, since CPUs multiply 16 bits one by one, if it
// returns a new tensor. Returns the type to round the product to, once, as tensor cores do.
std::optional<at::ScalarType> widen_operands(const OperatorHandle& op, Stack& arguments) {
  const auto product = kProducts.find(op.operator_name().name);
  if (product == kProducts.end() || !op.operator_name().overload_name.empty()) return std::nullopt;
  const at::ScalarType type = arguments[0].toTensor().scalar_type();
  if (type != at::kBFloat16 && type != at::kHalf) return std::nullopt;
  for (size_t i = 0; i < product->second + 2; ++i) {
    arguments[i] = arguments[i].toTensor().to(at::kFloat);
  }
  return type;
}

// --- Calls ---------------------------------------------------------------------------------------

void call_cpu(const OperatorHandle& op, Stack& stack) {
  round_operands(op, stack);
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto rounded_to = widen_operands(op, stack);
  op.redispatchBoxed(cpu_keys(), &stack);
  if (rounded_to) stack.back() = stack.back().toTensor().to(*rounded_to);
}

cudaStream_t stream_of(c10::DeviceIndex device) {
  return c10::cuda::getCurrentCUDAStream(device).stream();
}

// A call in a graph. Its new tensors have had their memory since the capture.
struct Captured {
  OperatorHandle op;
  Stack arguments;
  std::vector<at::Tensor> results;  // as host tensors; undefined if not new
};

void flatten(const IValue& v, std::vector<at::Tensor>& into) {
  if (v.isTensor()) into.push_back(v.toTensor());
  if (!v.isTensorList()) return;
  for (const at::Tensor& t : v.toTensorVector()) into.push_back(t);
}

void replay(void* of_graph) {
  const auto& call = *static_cast<const Captured*>(of_graph);
  try {
    Stack stack = call.arguments;
    call_cpu(call.op, stack);
    std::vector<at::Tensor> results;
    for (const IValue& v : stack) flatten(v, results);
    for (size_t i = 0; i < results.size(); ++i) {
      if (call.results[i].defined()) copy_bytes(call.results[i], results[i]);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s in a graph: %s\n", toString(call.op.operator_name()).c_str(),
                 error.what());
    std::abort();
  }
}

// Runs the call on copies to get the shapes of its results, and adds it to the graph.
void capture(const OperatorHandle& op, Arguments& arguments, Stack& results) {
  auto call = std::make_unique<Captured>(Captured{op, arguments.host, {}});
  Arguments copies = arguments;
  for (auto& [device, host] : copies.pairs) host = host.clone();
  const auto copied = [&](const at::Tensor& t) {
    for (size_t i = 0; i < copies.pairs.size(); ++i) {
      if (arguments.pairs[i].host.is_same(t)) return copies.pairs[i].host;
    }
    return t;
  };
  Stack stack;
  for (const IValue& v : arguments.host) {
    if (v.isTensor()) {
      stack.push_back(copied(v.toTensor()));
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(copied(t));
      stack.push_back(list);
    } else {
      stack.push_back(v);
    }
  }
  call_cpu(op, stack);
  New made;
  for (const IValue& v : stack) {
    results.push_back(on_device(v, copies, made));
    std::vector<at::Tensor> parts;
    flatten(v, parts);
    for (const at::Tensor& part : parts) {
      at::Tensor place;
      for (const auto& [host, device] : made) {
        if (host.is_same(part)) place = alias_of(device);
      }
      call->results.push_back(place);
    }
  }
  check(cudaLaunchHostFunc(stream_of(arguments.device.index()), &replay, call.release()));
}

void on_host(const OperatorHandle& op, Stack* stack) {
  Arguments arguments(op, *stack);
  const auto count = static_cast<int64_t>(op.schema().arguments().size());
  stack->erase(stack->end() - count, stack->end());
  arguments.devices.insert(arguments.device.index());
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream_of(arguments.device.index()), &status));
  if (status != cudaStreamCaptureStatusNone) return capture(op, arguments, *stack);
  for (const c10::DeviceIndex device : arguments.devices) {
    check(cudaStreamSynchronize(stream_of(device)));
  }
  Stack results = arguments.host;
  call_cpu(op, results);
  follow_size(arguments);
  New made;
  for (const IValue& v : results) stack->push_back(on_device(v, arguments, made));
  for (const auto& [host, device] : made) copy_bytes(device, host);
}

// PyTorch's own copies, on streams, serve whole tensors of one dtype and layout.
void copy_or_on_host(const OperatorHandle& op, Stack* stack) {
  const at::Tensor self = stack->at(stack->size() - 3).toTensor();
  const at::Tensor source = stack->at(stack->size() - 2).toTensor();
  const bool as_bytes = self.dtype() == source.dtype() && self.sizes() == source.sizes() &&
                        self.strides() == source.strides() && self.is_non_overlapping_and_dense() &&
                        self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  if (!as_bytes) return on_host(op, stack);
  at::Tensor to = self;
  const bool non_blocking = stack->back().toBool();
  stack->erase(stack->end() - 3, stack->end());
  stack->emplace_back(at::native::copy_(to, source, non_blocking));
}

// --- Registration --------------------------------------------------------------------------------

bool returns_views(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
  }
  return false;
}

class Quiet : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

torch::Library* make_library() {
  Quiet quiet;  // no warnings about replaced kernels
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || kStay.count(name.name) != 0) continue;
    if (!op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (returns_views(op->schema())) continue;
    const std::string full =
        name.name.substr(6) + (name.overload_name.empty() ? "" : ".") + name.overload_name;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>());
  }
  library->impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy_or_on_host>());
  // Attention is then composed of operators that have both kernels.
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
  return library;
}

torch::Library* const library = make_library();  // never destroyed, like CUDA's own kernels

}  // namespace
