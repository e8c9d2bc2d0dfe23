// Emulated links of process groups, by the axis that they lie along: for runs on one host that
// shall behave like those of a machine with such links.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "core/emulation/paced_link.h"

namespace axonn::ops {

// Bytes a second that a rank sends along each axis; axes that are left out are not slowed down.
// Values that axonn_ext/settings.py read; they hold for groups met from now on.
void configure_links(std::map<std::string, double> bytes_per_second);

// Whether the group lies along an axis whose link is emulated. Costs one load where none is.
bool is_paced(const c10d::ProcessGroup& group);

// The link of the group of that name, or null. The first call for a paced group is collective.
std::shared_ptr<comm::PacedLink> find_link(const std::string& name,
                                           const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace axonn::ops
