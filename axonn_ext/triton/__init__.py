"""Matmuls in Triton: one with fused epilogues, and its fusions with a collective.

    from axonn_ext.triton.matmul import matmul
    y = matmul(x, weight.t(), bias=bias, activation="gelu")

Importing this package does not import triton, but importing its modules `matmul`,
`all_gather_matmul`, `matmul_reduce_scatter` and `autotune` does. Triton is an optional dependency
(`pip install axonn-ext[triton]`).
"""
