// The functions of the driver that the machine has.
#pragma once

#include <map>
#include <string>

namespace axonn::gpu_machine {

// By the names by which programs ask for them.
std::map<std::string, void*> driver_functions();

}  // namespace axonn::gpu_machine
