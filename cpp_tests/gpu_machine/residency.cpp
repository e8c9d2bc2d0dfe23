#include "gpu_machine/residency.h"

#include <algorithm>

#include "gpu_machine/memory.h"

namespace axonn::gpu_machine {
namespace {

constexpr uint64_t kMostRegisters = 248, kRegisterStep = 8;

}  // namespace

uint32_t registers_of_thread(const Program& program, uint64_t threads) {
  const auto asked = static_cast<uint64_t>(program.max_registers);
  const auto bound =
      program.max_threads != 0 ? static_cast<uint64_t>(program.max_threads) : threads;
  const auto ctas = std::max<uint64_t>(1, static_cast<uint64_t>(program.min_ctas));
  const uint64_t most = asked != 0
                            ? align_up(asked, kRegisterStep)
                            : kRegistersOfSm / (bound * ctas) / kRegisterStep * kRegisterStep;
  return static_cast<uint32_t>(std::min(most, kMostRegisters));
}

Footprint footprint_of(const Program& program, uint64_t threads, uint64_t dynamic_shared_bytes) {
  const uint64_t whole = align_up(threads, kLanes);
  return {whole, whole * registers_of_thread(program, threads),
          program.shared_bytes + dynamic_shared_bytes + kReservedShared};
}

int ctas_of_sm(const Footprint& cta) {
  const uint64_t by_registers = cta.registers == 0 ? kCtasOfSm : kRegistersOfSm / cta.registers;
  return static_cast<int>(std::min(
      {kCtasOfSm, kThreadsOfSm / cta.threads, by_registers, kSharedOfSm / cta.shared_bytes}));
}

bool Residency::fits(const Sm& sm, const Footprint& cta) {
  return sm.ctas < kCtasOfSm && sm.threads + cta.threads <= kThreadsOfSm &&
         sm.registers + cta.registers <= kRegistersOfSm &&
         sm.shared_bytes + cta.shared_bytes <= kSharedOfSm;
}

std::optional<std::vector<int>> Residency::take(const Footprint& cta, uint64_t count,
                                                uint32_t first) {
  std::vector<int> taken;
  for (size_t step = 0; step < sms_.size() && taken.size() < count; ++step) {
    const size_t at = (first + step) % sms_.size();
    while (taken.size() < count && fits(sms_[at], cta)) {
      ++sms_[at].ctas;
      sms_[at].threads += cta.threads;
      sms_[at].registers += cta.registers;
      sms_[at].shared_bytes += cta.shared_bytes;
      taken.push_back(static_cast<int>(at));
    }
  }
  if (taken.size() == count) return taken;
  for (const int sm : taken) give(cta, sm);
  return std::nullopt;
}

void Residency::give(const Footprint& cta, int sm) {
  Sm& from = sms_[static_cast<size_t>(sm)];
  --from.ctas;
  from.threads -= cta.threads;
  from.registers -= cta.registers;
  from.shared_bytes -= cta.shared_bytes;
}

}  // namespace axonn::gpu_machine
