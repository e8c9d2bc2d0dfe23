// The settings of the fused ops on CUDA.
#pragma once

#include <cstdint>

namespace axonn::ops {

// Takes the number of SMs that a fused gather across hosts leaves to NCCL, as axonn_ext/settings.py
// read it; 0 means that there is no such gather.
void configure_fused_on_cuda(int64_t nccl_sms);
int64_t fused_nccl_sms();

}  // namespace axonn::ops
