#include "core/numeric/goldfish.h"

#include <algorithm>

namespace axonn::kernels {

void goldfish_labels(const GoldfishRows& rows, const GoldfishRule& rule, int64_t ignore_index,
                     int64_t begin, int64_t end, int64_t* out) {
  const int64_t per_row = rows.targets_per_row();
  for (int64_t i = begin; i < end;) {
    const int64_t row = i / per_row, row_end = std::min(end, (row + 1) * per_row);
    const int64_t* ids = rows.ids + row * rows.length;
    const int64_t* documents =
        rows.documents == nullptr ? nullptr : rows.documents + row * rows.length;
    for (; i < row_end; ++i) {
      const int64_t place = i - row * per_row + 1;
      out[i] = goldfish_drops(ids, documents, place, rule) ? ignore_index : ids[place];
    }
  }
}

}  // namespace axonn::kernels
