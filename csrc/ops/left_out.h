// The parts that this build of axonn_ext does not contain. setup.py generates the definition.
#pragma once

#include <map>
#include <string>

namespace axonn::ops {

// Returns the CUDA modules that were left out, by name, each with the reason.
std::map<std::string, std::string> left_out();

}  // namespace axonn::ops
