"""Whether the kernels for GPUs compute the right thing: the cases, which `axonn-ext verify` and the
tests share, and how they are run apart from each other.

accuracy.py     how close to a reference is close enough
virtual.py      the fused GEMM, alone and between virtual ranks of one GPU
ranks.py        the ops between ranks of their own;  linears.py: a Linear on every grid
products.py     kernels that compete for a whole product
groups.py       the cases in groups;  worker.py: one group in its processes;  run.py: all groups
"""
