"""What `algorithm="auto"` of the ops stands for: the algorithm that was measured to be fastest.

    with axonn_ext.warm_up():
        train_step(batch)              # every call that is not known yet is measured here
    for choice in axonn_ext.tuning.choices():
        print(choice)

Nothing is ever measured outside of a warm-up: a call whose signature (op, shapes, layouts, dtype,
group, threads) was never measured, by this process or an earlier one, uses the default: "fused"
where the ranks share memory, else "sequential". All ranks of a group use what its rank 0 found, for
its own layouts and threads; what is found first holds for all calls of a process that differ in
these alone. Results are kept in AXONN_CACHE_DIR.

The whole matrix products of a Linear with algorithm="auto" are chosen in the same way: "direct"
(the library's, the default), "transposed", "relayout_a", "relayout_b" or, on GPUs, by a kernel that
AXONN_PRODUCT_KERNELS names: "cublaslt_<algorithm>", "triton_<config>", "fused_sm90". What errs, by
more than rounding, is not measured. Their signatures begin with mm_forward, mm_dgrad and mm_wgrad.
`tune_product` settles one ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from axonn_ext import _library

PASSES = ("forward", "dgrad", "wgrad")

__all__ = ["PASSES", "Choice", "choices", "clear", "tune_product", "warm_up"]


@dataclass(frozen=True)
class Choice:
    """What "auto" stands for in calls of one signature on one group."""

    group: str  # its c10d name; empty: a product of this rank alone
    signature: str
    algorithm: str
    source: str  # "measured" by this process, from "disk", or "default": never measured
    median_us: dict[str, float]  # by algorithm, of the slowest rank; empty: never measured


@contextmanager
def warm_up() -> Iterator[None]:
    """Inside, calls with algorithm="auto" that were never measured are, before they are made.

    The op then runs on the call's own arguments, with every algorithm: at least six times each, and
    as often as fits about 0.2 s. A matmul that was met before the warm-up is measured at its second
    call inside; a Linear that was keeps its default until `clear()`, on all ranks.

    To be entered on all ranks; on a group where some ranks do not, rank 0 decides about
    signatures that are new to all, and those met before keep their default. Process-wide, all
    threads; nests.
    """
    _library.enter_warm_up()
    try:
        yield
    finally:
        _library.leave_warm_up()


def tune_product(
    a: Tensor, b: Tensor, *, product_pass: str, bias: Tensor | None = None
) -> Choice | None:
    """How Linears will compute a @ b (+ bias): found on disk or, if it is not there, measured now.

    a [M, K], b [K, N], bias [N], laid out as in the pass: forward x @ W.T, dgrad dy @ W, wgrad
    dy.T @ x. None: Linears do not ask about it (without an element, or, on the CPU, too small).

    Raises ValueError or TypeError for a pass that does not exist or tensors that do not fit.
    """
    if product_pass not in PASSES:
        raise ValueError(f"product_pass must be one of {', '.join(PASSES)}, got {product_pass!r}")
    with warm_up():
        signature = torch.ops.axonn._tune_mm(a, b, bias, f"mm_{product_pass}")
    alone = (c for c in choices() if not c.group and c.signature == signature)
    return next(alone, None)


def choices() -> list[Choice]:
    """What "auto" stands for in this process: every signature met, on every group that lives."""
    return [
        Choice(group, signature, algorithm, source, dict(median_us))
        for group, signature, algorithm, source, median_us in _library.tuning_choices()
    ]


def clear() -> None:
    """Forgets `choices()`, not what is on disk.

    To be called on all ranks, between the same calls: ranks that forget ask again.
    """
    _library.clear_tuning_choices()
