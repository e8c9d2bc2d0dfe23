// The order in which a persistent grid works through its tiles. It uses 32-bit arithmetic, because
// every warp of a kernel computes the order for each tile and a 64-bit division costs several times
// as much. The plans of tile_schedule.h produce the order, and explain it.
#pragma once

#include <cstdint>

#include "core/numeric/host_device.h"

namespace axonn::kernels {

// Tiles lie in batches of `along` x `across` tiles. A batch is one destination of a scatter;
// without a scatter, there is one batch. Within a batch, `group` tiles along take turns before the
// next one across, so that tiles that run at about the same time share both operands in L2. Batches
// and the dimension along start at `first_batch` and `first`, and wrap.
struct TileOrder {
  uint32_t along = 1;
  uint32_t across = 1;
  uint32_t batches = 1;
  uint32_t group = 1;
  uint32_t first = 0;
  uint32_t first_batch = 0;

  struct Place {
    uint32_t batch;
    uint32_t along;
    uint32_t across;
  };

  AXONN_HOST_DEVICE constexpr bool legal() const {
    return group >= 1 && (along == 0 || first < along) && (batches == 0 || first_batch < batches);
  }
  AXONN_HOST_DEVICE constexpr uint32_t num_tiles() const { return along * across * batches; }

  // Returns the place of the tile at position `index`.
  AXONN_HOST_DEVICE constexpr Place place(uint32_t index) const {
    const uint32_t per_batch = along * across;
    const uint32_t batch = index / per_batch;
    const uint32_t in_batch = index - batch * per_batch;
    const uint32_t group_index = in_batch / (group * across);
    const uint32_t begin = group_index * group;
    const uint32_t in_group = in_batch - begin * across;
    const uint32_t size = along - begin < group ? along - begin : group;
    const uint32_t column = in_group / size;
    const uint32_t row = begin + (in_group - column * size);
    return {wrapped(first_batch + batch, batches), wrapped(first + row, along), column};
  }

 private:
  AXONN_HOST_DEVICE static constexpr uint32_t wrapped(uint32_t value, uint32_t size) {
    return value >= size ? value - size : value;
  }
};

}  // namespace axonn::kernels
