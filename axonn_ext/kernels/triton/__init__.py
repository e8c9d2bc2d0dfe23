"""Triton kernels: a Linear's products, and GEMMs fused with a collective.

Importing this package, or its modules `register` and `tile_configs`, does not import triton;
importing its other modules does. Triton is an optional dependency (`pip install
axonn-ext[triton]`).
"""
