"""The specs of the two passes of cross-entropy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from axonn_ext.ops.spec import Call, OpSpec
from axonn_ext.ops.traffic import Collective

_LEGEND = """\
The vocabulary is split over the W ranks of the group; a rank's logits begin with column
first_column of the whole ones. labels (int64 or int32) count the whole vocabulary. A row whose
label is ignore_index has no loss and no gradient, and its logits are not read. Logits are float32,
float64, bfloat16 or float16. Arithmetic is in float32 (float64 for float64)."""


def _statistics_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _forward_results(call: Call) -> tuple[Tensor, ...]:
    rows, dtype = call.logits.shape[0], _statistics_dtype(call.logits)
    return (
        call.logits.new_empty([rows], dtype=dtype),
        call.logits.new_empty([2, rows], dtype=dtype),
    )


def _forward_collectives(call: Call) -> Iterator[Collective]:
    rows = call.logits.shape[0]
    like = call.logits.new_empty([0], dtype=_statistics_dtype(call.logits))
    for numbers in (1, 2):
        yield call.group.sum("all_reduce", numbers * rows, like)


SPECS = (
    OpSpec(
        "cross_entropy_forward",
        results=_forward_results,
        documentation=f"""\
Returns (losses, statistics): log(sum(exp(logits))) - logits[label] of each row, and what backward
needs.

    logits [M, N / W]   labels [M]   losses [M]   statistics [2, M]

{_LEGEND}
statistics are the largest logit of a whole row and the sum of exp(logit - largest), in fp32 (fp64
for fp64), as losses are. Backward keeps them and the logits, in their own dtype. With in_place,
backward writes the gradient over the logits, which must not be a leaf.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, for the pass over
a row; Shoeybi et al., "Megatron-LM", 2019, section 3, for the split over ranks.
Backward: cross_entropy_backward, or with in_place cross_entropy_backward_.
Collectives: all-reduce of the largest logit of each row, then of two sums.""",
        collectives=_forward_collectives,
    ),
    OpSpec(
        "cross_entropy_backward",
        results=lambda call: call.logits.new_empty(call.logits.shape),
        documentation=f"""\
Returns (softmax - onehot) * dy, the gradient of cross_entropy_forward.

    dy [M]   logits [M, N]   labels [M]   statistics [2, M]   result [M, N]

{_LEGEND}
It is rounded once, to the dtype of the logits. A second derivative is refused.""",
    ),
    OpSpec(
        "cross_entropy_backward_",
        results=lambda call: None,
        documentation=f"""\
Writes (softmax - onehot) * dy over the logits.

    dy [M]   logits [M, N]   labels [M]   statistics [2, M]

{_LEGEND}
The logits' version counter is raised: another backward pass that has saved them raises an error.
Raises ValueError for logits whose rows are not contiguous, or overlap.""",
    ),
)
