// Emulated links of process groups, chosen by mesh axis. They make runs on one host behave like
// runs on a machine with such links.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "core/emulation/emulated_link.h"

namespace axonn::ops {

// Sets how many bytes per second a rank sends along each axis; axes that are not given are not
// slowed down. The values come from axonn_ext/spec/settings.py and hold for groups met from now on.
void configure_links(std::map<std::string, double> bytes_per_second);

// Returns whether the group lies along an axis with an emulated link. It costs one load if no axis
// has one.
bool has_emulated_link(const c10d::ProcessGroup& group);

// Returns the emulated link of the named group, or null. The first call for a group with an
// emulated link is collective.
std::shared_ptr<comm::EmulatedLink> find_link(const std::string& name,
                                              const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace axonn::ops
