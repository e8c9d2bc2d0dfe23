// The names of the CUDA runtime that headers in csrc/core/cuda use, so that tests can include them
// without CUDA. Nothing here can be called.
#pragma once

struct CUstream_st;
using cudaStream_t = CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
