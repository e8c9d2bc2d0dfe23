"""Checks whether the GPU kernels compute correct results.

`axonn-ext verify` and the tests share these cases, which run in groups, each in its own processes.

accuracy.py     the largest errors that rounding explains
virtual.py      the fused GEMM, by itself and between virtual ranks of one GPU
ranks.py        the ops between real ranks;  linears.py: a Linear on every grid
products.py     the kernels that Linears may choose for a product
groups.py       the cases in groups;  worker.py: one group in its processes;  run.py: all groups
record.py       the stamp, written after every group
"""
