"""Kernels in Triton: a Linear's products, and GEMMs that are fused with a collective.

Importing this package, or its module `register`, does not import triton; importing its other
modules does, but for `tile_configs`. Triton is an optional dependency (`pip install
axonn-ext[triton]`).
"""
