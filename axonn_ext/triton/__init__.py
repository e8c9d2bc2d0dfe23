"""Kernels in Triton: a matmul with fused epilogues, and GEMMs that are fused with a collective.

    from axonn_ext.triton.matmul import matmul
    y = matmul(x, weight.t(), bias=bias, activation="gelu")

Importing this package, or its module `register`, does not import triton; importing its other
modules does, but for `tile_configs`. Triton is an optional dependency (`pip install
axonn-ext[triton]`).
"""
