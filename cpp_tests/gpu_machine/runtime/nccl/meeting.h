// A call as its ranks meet in it: pieces of its blocks, which sources give and sinks take, in any
// order that their dependencies allow.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "gpu_machine/agent.h"
#include "gpu_machine/runtime/nccl/calls.h"
#include "gpu_machine/runtime/nccl/sums.h"
#include "gpu_machine/runtime/nccl/wire.h"

namespace axonn::gpu_machine::nccl {

// What the adversary chooses for a call, the same for all of its ranks.
struct Choices {
  std::vector<int> ring;  // the ranks in the order in which they add
  int channels = 1;       // CTAs of each rank; 0: copy engines do it
  bool buffers = false;   // whether a source may end before the sinks have taken
  Rounding rounding = Rounding::kAtEachRank;
  std::vector<double> cuts;  // where blocks are cut into pieces, as parts of 1
};

class Meeting {
 public:
  // By which ranks in other processes meet, and the name of the meeting there.
  struct Place {
    std::shared_ptr<const Wire> wire;
    std::string name;
  };
  // Made by the rank that comes first, of its call; with a wire, by each.
  Meeting(const Call& call, int rank, int num_ranks, Choices choices, Place place = {});

  struct Piece {
    Block block;
    int64_t begin, count;  // elements of the block
    int channel;           // whose CTA moves it; -1: none is needed
    struct Given {
      std::vector<std::byte> bytes;
      Clock clock;
    };
    std::map<int, Given> given;  // by rank
    std::set<int> taken;
  };

  int channels() const { return choices_.channels; }
  size_t num_pieces() const { return pieces_.size(); }
  int channel_of(size_t piece) const { return pieces_[piece].channel; }

  // Does the next thing that this rank can do for a piece. Returns false if there is none now.
  // Throws MachineError as the agent does.
  bool step(size_t piece, int rank, const Call& call, Agent& agent);
  // Whether the rank's part in the piece is over.
  bool is_over(size_t piece, int rank) const;
  // Adds the ranks that this one still waits for.
  void add_awaited(int rank, std::set<int>& awaited) const;

 private:
  bool gives(const Piece& piece, int rank) const;
  bool takes(const Piece& piece, int rank) const;
  std::vector<std::byte> result(const Piece& piece) const;
  std::string given_name(size_t piece, int rank) const;
  std::string taken_name(size_t piece, int rank) const;
  // Whether all have given; brings what came by wire.
  bool have_all_given(size_t piece, int64_t bytes, const Agent& agent);
  void note_taken(size_t piece, int rank);
  bool have_all_taken(size_t piece, int rank) const;

  const Call first_;
  const Choices choices_;
  const Place place_;
  std::vector<Piece> pieces_;
};
using MeetingPtr = std::shared_ptr<Meeting>;

}  // namespace axonn::gpu_machine::nccl
