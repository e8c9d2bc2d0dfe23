"""Benchmarks: what is timed, how, and how it is shown; `axonn-ext bench`.

benchmark                    a Benchmark of systems on one rank; options that all have, their rows
output, charts               tables, notes, files and charts as all have them
launched                     the processes of a benchmark of several ranks
loss, optimizer, ops         benchmarks on one rank, with *_systems or *_cases, which they time
case, gemm, linear, block    a matmul with a collective, a Linear, a block; `reference` checks them
run, results, report, command    a rank's part of these, their rows, tables, chart and command line
pipeline, train, ranking     benchmarks of several ranks
fused_gemm, gemm_tiles, link_overlap    the kernels on one GPU
"""
