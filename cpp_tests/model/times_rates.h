// The rates and latencies that the model of kernel times uses: those of an H100 SXM and of NVLink 4
// in a node of eight. Each names its source or is an assumption. docs/kernel_model.md says how they
// are used. Those that the choice of a tile needs as well come from launch_config.h.
#pragma once

#include <vector>

#include "core/gemm/launch_config.h"

namespace axonn::times {

struct Quantity {
  const char* name;
  double value;
  const char* unit;
  bool assumed;        // no published measurement of it was found
  const char* source;  // if assumed: why the value is plausible

  constexpr operator double() const { return value; }
};

struct Rates {
  // --- An SM ------------------------------------------------------------------------------------
  Quantity clock_ghz{"clock under tensor load", kernels::kSm90.clock_ghz, "GHz", false,
                     "between 1.57, which kernel 11 of github.com/pranjalssh/fast.cu needs for "
                     "8192^3 in 1361 us after a rest, and 1.37, which torch needs in "
                     "bytedance/flux#90; it is below the boost clock because power is limited"};
  Quantity flops_per_cycle{"tensor cores", kernels::kSm90.flops_per_cycle, "flop/cycle/SM", false,
                           "H100 whitepaper: 989 TFLOP/s of 132 SMs at 1.83 GHz"};
  Quantity shared_bytes_per_cycle{"shared memory", 128, "byte/cycle/SM", false,
                                  "CUDA programming guide: 32 banks of 4 bytes"};
  Quantity l2_bytes_per_cycle{
      "L2 to an SM", kernels::kSm90.l2_bytes_per_cycle, "byte/cycle/SM", false,
      "what kernel 6 of fast.cu needs at least: tiles of 192 x 192 that no cluster shares, at the "
      "rate of its tensor cores"};
  Quantity load_us{"first load of a tile that waited", 0.8, "us", true,
                   "L2 and HBM latencies of 0.3 to 0.5 us, twice"};
  Quantity epilogue_us{"epilogue besides its bytes", 0.65, "us", true,
                       "the 1000 cycles of launch_config.cpp, at this clock"};
  Quantity hbm_gbps{"HBM", 2500, "GB/s", false,
                    "github.com/NVIDIA/nccl/issues/1264: p2pBandwidthLatencyTest within a GPU"};
  Quantity sms_for_hbm{"SMs that fill the HBM", 44, "SMs", true, "a third of them"};

  // --- A launch, the host -----------------------------------------------------------------------
  Quantity kernel_us{"from a kernel to the next of its stream", 1.5, "us", false,
                     "Accel-Sim's SM90_H100 configuration: 3000 cycles at 1.98 GHz"};
  Quantity event_us{"from an event to a stream that waits for it", 1.5, "us", true,
                    "as from a kernel to the next"};
  Quantity host_launch_us{"host: a launch", 3, "us", true, "2 to 4 us are usual"};
  Quantity host_copy_us{"host: a copy", 3, "us", true,
                        "arXiv:2602.21548 has 5 to 7 us in all, part of which is the engine's"};
  Quantity host_call_us{"host: an event, or a write of a value", 1, "us", true,
                        "a fraction of a launch"};

  // --- Copy engines and NVLink ------------------------------------------------------------------
  Quantity copy_gbps{"peer copies", kernels::kNvlink.copy_gbps, "GB/s", false,
                     "github.com/NVIDIA/nccl/issues/1264: p2pBandwidthLatencyTest, writes"};
  Quantity copy_us{"start of a copy", 1.5, "us", true, "as from a kernel to the next"};
  Quantity host_read_us{"copy engine: a word from the host's memory", 1.4, "us", true,
                        "a round trip over PCIe 5"};
  Quantity device_read_us{"copy engine: a word from its GPU's memory", 0.5, "us", true,
                          "the latency of HBM"};
  Quantity write_value_us{"copy queue: a write of a value", 0.6, "us", true,
                          "a posted write of the front end; no engine starts"};
  Quantity store_gbps{"TMA stores to peers", kernels::kNvlink.store_gbps, "GB/s", false,
                      "arXiv:2511.13940 (ParallelKittens): 74 % of the link, on B200"};
  Quantity multicast_gbps{
      "multicast, each way", 309, "GB/s", false,
      "github.com/NVIDIA/nccl-tests/issues/212: 275 GB/s of an NVLS all-reduce, "
      "which moves 9/8 of its bytes each way"};
  Quantity peer_us{"a store or a flag to a peer", 1.2, "us", true,
                   "p2pBandwidthLatencyTest has about 2 us there and back"};
  Quantity announce_us{"the atomic add and the flag of a tile", 0.8, "us", true,
                       "an L2 round trip, and the flag's store"};
  Quantity seen_us{"until a spinning warp sees a flag", 0.6, "us", true,
                   "an acquire from L2 every 0.4 us, nanosleep included"};

  // --- NCCL -------------------------------------------------------------------------------------
  Quantity nccl_small_us{"NCCL, LL128: start", 13, "us", false, "fit to NVIDIA/Megatron-LM#5596"};
  Quantity nccl_small_gbps{"NCCL, LL128", 240, "GB/s", false, "fit to NVIDIA/Megatron-LM#5596"};
  Quantity nccl_us{"NCCL, simple: start", 28, "us", false, "fit to NVIDIA/Megatron-LM#5596"};
  Quantity nccl_gbps{"NCCL, simple", 340, "GB/s", false,
                     "fit to NVIDIA/Megatron-LM#5596; nccl-tests/issues/326 has 360 for 16 GB"};
  Quantity nccl_sum_small_us{"NCCL, small all-reduce: start", 22, "us", false,
                             "fit to vllm-project/vllm#42324"};
  Quantity nccl_sum_small_gbps{"NCCL, small all-reduce", 150, "GB/s of the result", false,
                               "fit to vllm-project/vllm#42324"};
  Quantity nccl_sum_us{"NCCL, NVLS all-reduce: start", 72, "us", false,
                       "fit to vllm-project/vllm#42324"};
  Quantity nccl_sum_gbps{"NCCL, NVLS all-reduce", 275, "GB/s of the result", false,
                         "github.com/NVIDIA/nccl-tests/issues/212"};
  Quantity nccl_send_us{"NCCL over hosts: a group of a send and a receive",
                        kernels::kNetwork.chunk_us, "us", true,
                        "a kernel, and a round of its proxies"};
  Quantity network_gbps{"network of a GPU", kernels::kNetwork.copy_gbps, "GB/s", true,
                        "a NIC of 400 Gbit/s, less headers"};
};

inline constexpr Rates kH100{};
inline constexpr int kNumSms = kernels::kSm90.num_sms;

// Returns all quantities, for printing.
inline std::vector<Quantity> all(const Rates& r) {
  return {r.clock_ghz,
          r.flops_per_cycle,
          r.shared_bytes_per_cycle,
          r.l2_bytes_per_cycle,
          r.load_us,
          r.epilogue_us,
          r.hbm_gbps,
          r.sms_for_hbm,
          r.kernel_us,
          r.event_us,
          r.host_launch_us,
          r.host_copy_us,
          r.host_call_us,
          r.copy_gbps,
          r.copy_us,
          r.host_read_us,
          r.device_read_us,
          r.write_value_us,
          r.store_gbps,
          r.multicast_gbps,
          r.peer_us,
          r.announce_us,
          r.seen_us,
          r.nccl_small_us,
          r.nccl_small_gbps,
          r.nccl_us,
          r.nccl_gbps,
          r.nccl_sum_small_us,
          r.nccl_sum_small_gbps,
          r.nccl_sum_us,
          r.nccl_sum_gbps,
          r.nccl_send_us,
          r.network_gbps};
}

// Returns the time in microseconds that `bytes` take.
constexpr double us_of(double bytes, double gbps) { return bytes / gbps / 1e3; }

}  // namespace axonn::times
