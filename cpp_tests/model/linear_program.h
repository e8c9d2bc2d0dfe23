// A rank's work in a fused Linear, which has calls on three groups open at once, as a list of steps
// for the tests' simulator. The steps are recorded from core/symmetric/fused_order.h, the code that
// ops/cpu/linear.cpp runs.
#pragma once

#include <array>
#include <cstdint>

#include "model/protocol_program.h"

namespace axonn::comm {

// A rank's place in the groups of its axes, and the epoch of the latest call there.
struct LinearAxes {
  Caller& r;
  Caller& s;
  Caller& z;
};

// The parameters that all ranks agree on. Sizes are those of whole matrices and must divide evenly:
// input [rows, in_features], weight [features, in_features], output [rows, features].
struct LinearPass {
  enum class Kind { kForward, kBackward };

  Kind kind = Kind::kForward;
  int64_t rows = 12;
  int64_t in_features = 12;
  int64_t features = 12;
  bool sharded = true;
  int64_t gather_dim = 0;   // of x along r, and of dx
  int64_t scatter_dim = 0;  // of y along s, and of dy
  bool one_shot = false;    // all-reduces are small
  // Whether parts of rows are multiplied in one product: for the first product (y, or dx), and for
  // dweight.
  std::array<bool, 2> in_one_piece = {};
  bool save_input = false;  // forward: keep the gathered input; backward: it was kept
  bool save_weight = false;
  // Which factors are joined before they are multiplied: the two factors of the first product (y,
  // or dx), and those of dweight. ops/cpu/product.cpp decides that; any choice is safe.
  std::array<bool, 4> joins = {};
  std::array<bool, 3> mask = {true, true, true};  // backward: dx, dweight, dbias are wanted
};

// Returns a rank's program for one pass. Raises the epochs of the axes that take part.
Program linear_program(const LinearPass& pass, const LinearAxes& axes);

}  // namespace axonn::comm
