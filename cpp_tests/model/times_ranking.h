// How designs compare over the published layers.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "model/times_designs.h"
#include "model/times_work.h"

namespace axonn::times {

enum class Call { kGather, kScatter, kSum, kBoth, kHostsGather, kHostsScatter };
const char* name_of(Call call);

// Modelled microseconds of a call for each published layer and number of rows, in a fixed order.
std::vector<double> modelled(Call call, const Design& design);
// The same for the libraries.
std::vector<double> modelled_libraries(Call call);

// A letter, the call that it changes, and the design that it is added to.
struct Step {
  char letter;
  Call call;
  std::string on_top_of;
};
const std::vector<Step>& steps();

// Speed-up of the design over the libraries: the median and the smallest.
struct Speedup {
  double median;
  double worst;
};
Speedup speedup(Call call, const Design& design);

// Returns how much faster each layer is with the second design, as ratios of times.
std::vector<double> gains(Call call, const Design& before, const Design& after);
double median(std::vector<double> values);

}  // namespace axonn::times
