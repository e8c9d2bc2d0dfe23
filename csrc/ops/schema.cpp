// Every schema of the extension's ops. (The exceptions are _why_no_fused and _gemm_backend_sm90,
// which are defined next to their implementations, in the modules with the kernels.) A group is
// passed as its c10d name and its size. The name finds the process group at run time; the size lets
// shapes be computed, and compiled graphs be told apart, without a process group. `algorithm` is
// "auto", "fused", "chunked" or "sequential".
#include <torch/library.h>

TORCH_LIBRARY(axonn, m) {
  // Collectives. `dim` is the dimension that is concatenated or cut.
  m.def(
      "all_gather(Tensor shard, int dim, str group_name, int group_size, str algorithm) -> Tensor");
  m.def(
      "reduce_scatter(Tensor input, int dim, str group_name, int group_size, str algorithm) -> "
      "Tensor");
  m.def(
      "all_reduce(Tensor input, str reduce_op, str group_name, int group_size, str algorithm) -> "
      "Tensor");

  // Matmuls with the collective that feeds or drains them. b is [K, N], as in torch.mm.
  m.def(
      "all_gather_matmul(Tensor a_shard, Tensor b, int gather_dim, str group_name, int group_size, "
      "str algorithm) -> Tensor");
  m.def(
      "matmul_all_gather_rhs(Tensor a, Tensor b_shard, int gather_dim, str group_name, "
      "int group_size, str algorithm) -> Tensor");
  m.def(
      "matmul_reduce_scatter(Tensor a, Tensor b, int scatter_dim, str group_name, int group_size, "
      "str algorithm) -> Tensor");
  m.def(
      "matmul_all_reduce(Tensor a, Tensor b, str group_name, int group_size, str algorithm, "
      "bool deterministic) -> Tensor");

  // The fused forms of these on CUDA, which the ops above call. `arriving` says what `shard` is
  // part of: "rows" of a, "columns" of b, or, along K, "inner" of b or "inner_a" of a. `transport`
  // is "copy_engine", "nccl" or "auto". `everywhere` makes it an all-reduce, whose sums are
  // broadcast by "auto", "copy_engine", "peer_stores" or "multicast"; or, with bits that may differ
  // from call to call, added up in the "switch", or in the best way ("any_order").
  m.def(
      "_fused_all_gather_matmul(Tensor shard, Tensor other, str arriving, str transport, int "
      "nccl_sms, str group_name, int group_size, float timeout_seconds, int free_sms=0, bool "
      "graphs_in_turn=False) -> Tensor");
  m.def(
      "_fused_matmul_sum(Tensor a, Tensor b, bool everywhere, str sum_broadcast, str group_name, "
      "int group_size, float timeout_seconds, int free_sms=0, bool graphs_in_turn=False) -> "
      "Tensor");

  // Returns why a device has no fused form for a dtype and a number of ranks, whatever the sizes,
  // or an empty string if it has one. The module with the kernels defines _why_no_fused, which also
  // takes sizes.
  m.def(
      "_why_no_fused_here(Device device, ScalarType dtype, int group_size, bool across_hosts) -> "
      "str");

  // Launch the Triton kernels of the fused forms on the current stream, for devices without
  // CUTLASS's (ops/cuda/triton_gemm.cpp). Both multiply a [m, k] @ b [k, n] in at most max_programs
  // programs, and signal peers through flags at the given addresses. In the first, the operand that
  // arrives, a or b, is this rank's workspace, and d [m, n] is the result. In the second, the rows
  // of the result leave for slots, one at each rank.
  m.def(
      "_fused_gather_triton(Tensor a, Tensor b, Tensor(d!) d, str arriving, int rank, int "
      "num_ranks, "
      "int chunks_per_shard, int chunk_tile, int pad, int epoch, int failure, int timeout_ns, int "
      "max_programs) -> ()");
  m.def(
      "_fused_scatter_triton(Tensor a, Tensor b, int rank, int chunks_per_shard, int[] slots, "
      "int[] "
      "pads, int counters, int epoch, int max_programs) -> ()");

  // _tuned_mm returns a @ b, plus bias in each row, in the given way (ops/tuning/product.h).
  // _tune_mm chooses the best way and returns the name under which that choice is kept.
  m.def("_tuned_mm(Tensor a, Tensor b, Tensor? bias, str variant) -> Tensor");
  m.def("_tune_mm(Tensor a, Tensor b, Tensor? bias, str name) -> str");

  // Kernels for these products, which other modules register for the devices that have them. The
  // first op of a pair returns an empty list for operands that no kernel takes; otherwise the
  // version that the kernels' times depend on, then a name for each kernel (empty if there is only
  // one). The second op returns the product by the named kernel, or nothing.
  m.def("_mm_cublaslt_candidates(Tensor a, Tensor b, Tensor? bias) -> str[]");
  m.def("_mm_cublaslt(Tensor a, Tensor b, Tensor? bias, str name) -> Tensor[]");
  m.def("_mm_triton_candidates(Tensor a, Tensor b, Tensor? bias) -> str[]");
  m.def("_mm_triton(Tensor a, Tensor b, Tensor? bias, str name) -> Tensor[]");
  m.def("_mm_fused_sm90_candidates(Tensor a, Tensor b, Tensor? bias) -> str[]");
  m.def("_mm_fused_sm90(Tensor a, Tensor b, Tensor? bias, str name) -> Tensor[]");

  // The Linear of the 3D matmul. Groups come in the order (r, s, z): r gathers the input, s sums
  // the output, z holds the weight's rows. A fourth group, with the ranks of all three, lets "auto"
  // be measured. Empty tensors stand for results that are not kept or not requested.
  m.def(
      "linear_forward(Tensor x, Tensor weight, Tensor? bias, str[] group_names, "
      "int[] group_sizes, bool sharded, int gather_dim, int scatter_dim, bool save_input, "
      "bool save_weight, str algorithm, bool deterministic) -> (Tensor y, Tensor full_x, "
      "Tensor full_weight)");
  m.def(
      "linear_backward(Tensor dy, Tensor x, Tensor weight, bool x_is_full, bool weight_is_full, "
      "bool[3] output_mask, str[] group_names, int[] group_sizes, bool sharded, int gather_dim, "
      "int scatter_dim, str algorithm, bool deterministic) -> (Tensor dx, Tensor dweight, "
      "Tensor dbias)");

  // Finds ids of a vocabulary in this rank's rows of a table, which begin with row `first`. Returns
  // the rows, clamped to those that exist, and whether each id is among them. On the CPU, and
  // elsewhere if `check` (which makes the host wait), ids must be in [0, vocab_size) or
  // ignore_index; an error names `label`, value, position and rank.
  m.def(
      "local_rows(Tensor ids, int first, int num_rows, int vocab_size, int? ignore_index, "
      "bool check, str label, int rank) -> (Tensor rows, Tensor is_here)");

  // Cross-entropy over a vocabulary that is split over the ranks of a group. A rank's logits begin
  // with column `first_column` of the whole ones; a row whose label is ignore_index has no loss.
  // statistics holds, for each row over all ranks, the largest logit and the sum of exp(logit -
  // largest). With in_place, backward writes the gradient over the logits.
  m.def(
      "cross_entropy_forward(Tensor logits, Tensor labels, int first_column, int ignore_index, "
      "bool in_place, str group_name, int group_size, str algorithm) -> (Tensor losses, Tensor "
      "statistics)");
  m.def(
      "cross_entropy_backward(Tensor dy, Tensor logits, Tensor labels, Tensor statistics, "
      "int first_column, int ignore_index) -> Tensor");
  m.def(
      "cross_entropy_backward_(Tensor dy, Tensor(a!) logits, Tensor labels, Tensor statistics, "
      "int first_column, int ignore_index) -> ()");

  // The parts of these that access the logits, whose rows must be contiguous. The first returns
  // three numbers per row: the largest logit, the sum of exp(logit - largest), and the label's
  // logit (0 if another rank has it). The second writes the gradient to `out`, which may be the
  // logits.
  m.def(
      "_cross_entropy_scan(Tensor logits, Tensor labels, int first_column, int ignore_index) -> "
      "Tensor");
  m.def(
      "_cross_entropy_gradient(Tensor dy, Tensor logits, Tensor labels, Tensor statistics, "
      "int first_column, int ignore_index, Tensor(a!) out) -> ()");

  // Returns the sum of slots [W, ..] over W, in slot order, accumulated in fp32 (fp64 for fp64,
  // integers exactly), as a fused reduce-scatter sums what its ranks have stored.
  m.def("_reduce_slots(Tensor slots) -> Tensor");

  // Updates masters and moments with AdamW, and sets weights to the masters. Tensors at the same
  // index of the lists belong together. A step counts their updates, including this one.
  m.def(
      "_adamw_(Tensor[] gradients, Tensor(a!)[] masters, Tensor(b!)[] exp_avgs, "
      "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] weights, Tensor[] steps, float lr, float beta1, "
      "float beta2, float eps, float weight_decay, float gradient_factor) -> ()");

  // Fills a block of a parameter with the values that its elements have on every grid. `offsets` is
  // the position of the block in the full tensor. a and b are mean and standard deviation, or low
  // and high.
  m.def(
      "fill_random_(Tensor(a!) out, int[] full_sizes, int[] offsets, str name, int seed, "
      "str distribution, float a, float b) -> ()");
}
