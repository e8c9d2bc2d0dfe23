// Marks what host code and CUDA kernels both call. Such headers are C++17: nvcc compiles kernels as
// that.
#pragma once

#if defined(__CUDACC__)
#define AXONN_HOST_DEVICE __host__ __device__
#else
#define AXONN_HOST_DEVICE
#endif
