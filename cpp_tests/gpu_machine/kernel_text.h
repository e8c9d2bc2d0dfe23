// PTX for tests: small kernels made from their bodies.
#pragma once

#include <string>

namespace axonn::gpu_machine::testing {

// The kernel `test` with one parameter, held by %out. Declares the registers that bodies use.
inline std::string kernel_of(const std::string& body, const std::string& variables = "") {
  return R"(
.version 9.0
.target sm_90
.address_size 64
)" + variables +
         R"(
.visible .entry test(.param .u64 test_param_0)
{
  .reg .pred %p<16>;
  .reg .b16 %h<16>;
  .reg .b32 %r<32>;
  .reg .f32 %f<16>;
  .reg .b64 %d<32>;
  .reg .f64 %e<16>;
  .reg .b64 %out;
  ld.param.u64 %out, [test_param_0];
)" + body +
         "\n  ret;\n}\n";
}

}  // namespace axonn::gpu_machine::testing
