// The tables of docs/kernel_model.md, each between the marks <!-- NAME: begin --> and
// <!-- NAME: end -->.
#pragma once

#include <string>

namespace axonn::times {

// Returns the page with today's tables between its marks. Two tables take half a minute to compute;
// they stay as they are unless `slow_ones`. Throws std::invalid_argument if a table has no marks.
std::string with_tables(std::string page, bool slow_ones);

}  // namespace axonn::times
