// What is configured of the fused ops on CUDA.
#pragma once

#include <cstdint>

namespace axonn::ops {

// SMs that a fused gather across hosts leaves to NCCL; 0: there is none. A value that
// axonn_ext/settings.py read.
void configure_fused_on_cuda(int64_t nccl_sms);
int64_t fused_nccl_sms();

}  // namespace axonn::ops
