#include "ops/autograd/calls.h"

namespace axonn::ops::autograd {
namespace {

using CollectiveSignature = Tensor(const Tensor&, int64_t, const std::string&, int64_t,
                                   const std::string&);
using AllReduceSignature = Tensor(const Tensor&, const std::string&, const std::string&, int64_t,
                                  const std::string&);
using MatmulSignature = Tensor(const Tensor&, const Tensor&, int64_t, const std::string&, int64_t,
                               const std::string&);
using MatmulAllReduceSignature = Tensor(const Tensor&, const Tensor&, const std::string&, int64_t,
                                        const std::string&);

}  // namespace

Tensor all_gather(const Tensor& t, int64_t dim, const GroupArguments& g) {
  static const auto op = find<CollectiveSignature>("axonn::all_gather");
  return op.call(t, dim, g.name, g.size, g.algorithm);
}
Tensor reduce_scatter(const Tensor& t, int64_t dim, const GroupArguments& g) {
  static const auto op = find<CollectiveSignature>("axonn::reduce_scatter");
  return op.call(t, dim, g.name, g.size, g.algorithm);
}
Tensor all_reduce(const Tensor& t, const std::string& reduce_op, const GroupArguments& g) {
  static const auto op = find<AllReduceSignature>("axonn::all_reduce");
  return op.call(t, reduce_op, g.name, g.size, g.algorithm);
}
Tensor all_gather_matmul(const Tensor& a, const Tensor& b, int64_t dim, const GroupArguments& g) {
  static const auto op = find<MatmulSignature>("axonn::all_gather_matmul");
  return op.call(a, b, dim, g.name, g.size, g.algorithm);
}
Tensor matmul_all_gather_rhs(const Tensor& a, const Tensor& b, int64_t dim,
                             const GroupArguments& g) {
  static const auto op = find<MatmulSignature>("axonn::matmul_all_gather_rhs");
  return op.call(a, b, dim, g.name, g.size, g.algorithm);
}
Tensor matmul_reduce_scatter(const Tensor& a, const Tensor& b, int64_t dim,
                             const GroupArguments& g) {
  static const auto op = find<MatmulSignature>("axonn::matmul_reduce_scatter");
  return op.call(a, b, dim, g.name, g.size, g.algorithm);
}
Tensor matmul_all_reduce(const Tensor& a, const Tensor& b, int64_t, const GroupArguments& g) {
  static const auto op = find<MatmulAllReduceSignature>("axonn::matmul_all_reduce");
  return op.call(a, b, g.name, g.size, g.algorithm);
}

}  // namespace axonn::ops::autograd
