// Operands of gathers and sums for tests of fused calls.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "gpu_machine/runtime/matrices.h"
#include "gpu_machine/runtime/virtual_ranks.h"

namespace axonn::gpu_machine::testing {

// Operands of the ranks, with the results of a gather of the a's rows and of a sum.
struct Operands {
  Operands(VirtualRanks& of_ranks, int64_t rows, int64_t with_k, int64_t with_n,
           std::mt19937_64& random)
      : ranks(of_ranks), m(rows), k(with_k), n(with_n), whole(Matrix::random(m, k, random)) {
    const int64_t size = ranks.size();
    for (int r = 0; r < ranks.size(); ++r) {
      const DeviceGuard guard(r);
      const comm::Range own = comm::part_of(m, size, r);
      shards.emplace_back(whole.row_range(own.begin, own.end));
      const Matrix b = Matrix::random(k, n, random), a = Matrix::random(m, k, random);
      bs.emplace_back(b);
      as.emplace_back(a);
      gathered.push_back(whole * b);
      sum = sum ? *sum + a * b : a * b;
    }
  }

  std::vector<DeviceMatrix> outputs(int64_t rows) const {
    std::vector<DeviceMatrix> made;
    for (int r = 0; r < ranks.size(); ++r) {
      const DeviceGuard guard(r);
      made.emplace_back(rows, n);
    }
    return made;
  }

  VirtualRanks& ranks;
  int64_t m, k, n;
  Matrix whole;
  std::vector<DeviceMatrix> shards, as, bs;
  std::vector<Matrix> gathered;
  std::optional<Matrix> sum;
};

}  // namespace axonn::gpu_machine::testing
