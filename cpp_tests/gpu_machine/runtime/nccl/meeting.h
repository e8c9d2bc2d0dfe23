// A call in which its ranks meet: pieces of its blocks, which sources give and sinks take, in any
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

// The adversary's choices for a call, the same on all of its ranks.
struct Choices {
  std::vector<int> ring;  // the ranks, in the order of addition
  int channels = 1;       // CTAs per rank; 0: copy engines do the work
  bool buffers = false;   // whether a source may end before the sinks take
  Rounding rounding = Rounding::kAtEachRank;
  std::vector<double> cuts;  // where blocks are cut into pieces, as fractions
};

class Meeting {
 public:
  // How ranks in other processes meet, and the name of the meeting there.
  struct Place {
    std::shared_ptr<const Wire> wire;
    std::string name;
  };
  // Made by the first rank that comes, from its call; with a wire, by every rank.
  Meeting(const Call& call, int rank, int num_ranks, Choices choices, Place place = {});

  struct Piece {
    Block block;
    int64_t begin, count;  // in elements of the block
    int channel;           // the CTA that moves it; -1: none is needed
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
  // Throws MachineError through the agent.
  bool step(size_t piece, int rank, const Call& call, Agent& agent);
  // Whether the rank has done its part of the piece.
  bool is_over(size_t piece, int rank) const;
  // Adds the ranks that this one still waits for.
  void add_awaited(int rank, std::set<int>& awaited) const;

 private:
  bool gives(const Piece& piece, int rank) const;
  bool takes(const Piece& piece, int rank) const;
  std::vector<std::byte> result(const Piece& piece) const;
  std::string given_name(size_t piece, int rank) const;
  std::string taken_name(size_t piece, int rank) const;
  // Whether all sources have given; fetches what came by wire.
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
