// Marks functions that both host code and CUDA kernels call. Headers that use it are C++17, because
// nvcc compiles kernels as C++17.
#pragma once

#if defined(__CUDACC__)
#define AXONN_HOST_DEVICE __host__ __device__
#else
#define AXONN_HOST_DEVICE
#endif
