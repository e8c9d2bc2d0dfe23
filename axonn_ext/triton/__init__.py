"""Matrix multiplies in Triton: a matmul with fused epilogues, and its fusions with a collective.

    from axonn_ext.triton.matmul import matmul
    y = matmul(x, weight.t(), bias=bias, activation="gelu")

Importing this package imports no triton; `matmul`, `all_gather_matmul`, `matmul_reduce_scatter` and
`autotune` do. Nothing else of axonn_ext imports them: triton is an optional dependency
(`pip install axonn-ext[triton]`).
"""
