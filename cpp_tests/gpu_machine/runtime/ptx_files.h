// PTX that lies in files, apart from the programs whose kernels it holds.
#pragma once

#include <map>
#include <string>

namespace axonn::gpu_machine {

// Returns the file of each kernel in the *.ptx of a folder, by the kernel's name in PTX.
std::map<std::string, std::string> files_of_kernels(const std::string& folder);

// Throws std::runtime_error if it cannot be read.
std::string text_of_file(const std::string& path);

}  // namespace axonn::gpu_machine
