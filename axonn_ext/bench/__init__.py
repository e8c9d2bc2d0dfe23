"""The benchmarks of `axonn-ext bench`: their cases, timing and output.

benchmark                    a Benchmark of systems on one rank; common options and rows
output, charts               tables, notes, files and charts that all benchmarks share
launched                     the processes of a benchmark of several ranks
loss, optimizer, ops         benchmarks on one rank; *_systems or *_cases have what they time
case, gemm, linear, block    a matmul with a collective, a Linear, a block; `reference` checks them
run, results, report, command    one rank's work for these, their rows, tables, chart and options
pipeline, train, ranking     benchmarks of several ranks
fused_gemm, gemm_tiles, link_overlap    the kernels on one GPU
"""
