"""The compiled modules, Triton's kernels, and which kernels are verified and measured."""
