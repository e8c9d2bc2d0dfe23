// PTX from files, apart from the programs that launch its kernels.
#pragma once

#include <map>
#include <string>

#include "gpu_machine/ptx.h"

namespace axonn::gpu_machine {

// Returns the file of each kernel in the *.ptx of a folder, by the kernel's name in PTX. Leaves out
// kernels that run on a single compute capability other than `sm`.
std::map<std::string, std::string> files_of_kernels(const std::string& folder, int sm);

// The module of a file, parsed at the first use. Not for several threads at a time. Throws
// std::runtime_error if the file cannot be read.
const Module& module_of_file(const std::string& path);

}  // namespace axonn::gpu_machine
