// The functions of the driver that the machine provides.
#pragma once

#include <map>
#include <string>

namespace axonn::gpu_machine {

// By the names that programs ask for.
std::map<std::string, void*> driver_functions();

}  // namespace axonn::gpu_machine
