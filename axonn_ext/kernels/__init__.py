"""The compiled modules, the Triton kernels, and which kernels are verified and measured."""
