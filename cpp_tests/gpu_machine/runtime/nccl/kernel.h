// A rank's part of a group of calls, as it runs on the device.
#pragma once

#include <string>
#include <vector>

#include "gpu_machine/machine.h"
#include "gpu_machine/runtime/nccl/communicators.h"

namespace axonn::gpu_machine::nccl {

// It takes room for CTAs as kernels do, in any order, whole clusters at a time. A CTA moves the
// pieces of one channel, so a rank whose CTAs find no room keeps its peers waiting.
class Kernel {
 public:
  Kernel(Nccl& nccl, CommPtr comm, std::vector<Call> calls);

  Progress attempt(Agent& agent);
  std::string describe() const;

 private:
  enum class CtaState { kAbsent, kResident, kLeft };
  struct Part {
    Call call;
    MeetingPtr meeting;
  };

  void begin();
  void meet_collectives(const std::vector<Call>& collectives);
  MeetingPtr meet_transfer(const Call& call);
  // Choices that ranks in several processes must share are drawn from the name of their meeting.
  Choices choose(const Call& call, const std::string& meeting) const;
  MeetingPtr make_meeting(const Call& call, const std::string& name) const;
  bool start_cluster();
  bool step(Agent& agent);
  bool retire();
  Progress leave();
  bool is_over(int channel) const;
  bool is_resident(int channel) const {
    return channel < 0 || ctas_[static_cast<size_t>(channel)] == CtaState::kResident;
  }

  Nccl& nccl_;
  const CommPtr comm_;
  const std::vector<Call> calls_;
  bool has_begun_ = false;
  int naps_ = 0;  // turns in which it does nothing
  std::vector<Part> parts_;
  std::vector<CtaState> ctas_;
  std::vector<size_t> order_;  // the order in which clusters start
};

}  // namespace axonn::gpu_machine::nccl
