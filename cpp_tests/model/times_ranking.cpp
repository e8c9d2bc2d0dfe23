#include "model/times_ranking.h"

#include <algorithm>
#include <cstddef>

#include "model/times_calls.h"
#include "model/times_hosts.h"
#include "model/times_library.h"

namespace axonn::times {
namespace {

template <class Items, class Us>
std::vector<double> each(const Items& items, Us&& us) {
  std::vector<double> result;
  for (const auto& item : items) result.push_back(us(item));
  return result;
}

std::vector<double> ratios(const std::vector<double>& before, const std::vector<double>& after) {
  std::vector<double> result;
  for (std::size_t i = 0; i < before.size(); ++i) result.push_back(before[i] / after[i]);
  return result;
}

}  // namespace

const char* name_of(Call call) {
  switch (call) {
    case Call::kGather:
      return "all-gather, GEMM";
    case Call::kScatter:
      return "GEMM, reduce-scatter";
    case Call::kSum:
      return "GEMM, all-reduce";
    case Call::kBoth:
      return "all-gather, GEMM, reduce-scatter";
    case Call::kHostsGather:
      return "all-gather over 8 hosts, GEMM";
    case Call::kHostsScatter:
      return "GEMM, reduce-scatter over 8 hosts";
  }
  return "";
}

std::vector<double> modelled(Call call, const Design& design) {
  switch (call) {
    case Call::kGather:
      return each(gathers(), [&](const Work& w) { return all_gather_gemm(w, design).us(); });
    case Call::kScatter:
      return each(scatters(), [&](const Work& w) { return gemm_reduce_scatter(w, design).us(); });
    case Call::kSum:
      return each(scatters(), [&](const Work& w) { return gemm_all_reduce(w, design).us(); });
    case Call::kBoth:
      return each(linears(), [&](const Both& b) { return fused_both_us(b, design); });
    case Call::kHostsGather:
      return each(gathers(), [&](const Work& w) { return hosts_gather_us(w, design); });
    case Call::kHostsScatter:
      return each(scatters(), [&](const Work& w) { return hosts_scatter_us(w, design); });
  }
  return {};
}

std::vector<double> modelled_libraries(Call call) {
  switch (call) {
    case Call::kGather:
      return each(gathers(), [](const Work& w) { return library_gather_us(w); });
    case Call::kScatter:
      return each(scatters(), [](const Work& w) { return library_scatter_us(w); });
    case Call::kSum:
      return each(scatters(), [](const Work& w) { return library_sum_us(w); });
    case Call::kBoth:
      return each(linears(), [](const Both& b) { return library_both_us(b); });
    case Call::kHostsGather:
      return each(gathers(), [](const Work& w) {
        return hosts_library_us(w, w.gathered_bytes() / w.ranks * (w.ranks - 1));
      });
    case Call::kHostsScatter:
      return each(scatters(), [](const Work& w) { return hosts_scatter_us(w, {}); });
  }
  return {};
}

const std::vector<Step>& steps() {
  static const std::vector<Step> result = {
      {'m', Call::kGather, "p"},       {'o', Call::kGather, "m"},
      {'c', Call::kGather, "mop"},     {'b', Call::kGather, "mo"},
      {'d', Call::kGather, "mo"},      {'k', Call::kGather, "mo"},
      {'g', Call::kGather, "mop"},     {'m', Call::kScatter, "p"},
      {'a', Call::kScatter, "m"},      {'e', Call::kScatter, "ma"},
      {'n', Call::kScatter, "mae"},    {'g', Call::kScatter, "maep"},
      {'m', Call::kSum, "p"},          {'a', Call::kSum, "m"},
      {'l', Call::kSum, "ma"},         {'e', Call::kSum, "mal"},
      {'n', Call::kSum, "male"},       {'g', Call::kSum, "malep"},
      {'j', Call::kSum, "ma"},         {'j', Call::kSum, "mae"},
      {'j', Call::kSum, "male"},       {'h', Call::kBoth, "maoe"},
      {'m', Call::kHostsGather, "p"},  {'f', Call::kHostsGather, "m"},
      {'i', Call::kHostsScatter, "m"}, {'p', Call::kGather, "mo"},
      {'p', Call::kScatter, "ma"},     {'p', Call::kSum, "ma"},
      {'p', Call::kSum, "maej"},       {'p', Call::kHostsGather, "m"}};
  return result;
}

Speedup speedup(Call call, const Design& design) {
  const std::vector<double> each = ratios(modelled_libraries(call), modelled(call, design));
  return {median(each), *std::min_element(each.begin(), each.end())};
}

std::vector<double> gains(Call call, const Design& before, const Design& after) {
  return ratios(modelled(call, before), modelled(call, after));
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace axonn::times
