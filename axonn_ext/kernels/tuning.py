"""Measures which algorithm is fastest, for the ops' `algorithm="auto"`.

    with axonn_ext.warm_up():
        train_step(batch)              # every call that was never measured is measured here
    for choice in axonn_ext.tuning.choices():
        print(choice)

Calls are measured only inside a warm-up. The signature of a call is its op, shapes, layouts, dtype,
group and number of threads. A call whose signature was never measured, by this process or an
earlier one, uses the default: "fused" where the ranks share memory, else "sequential". Rank 0 of a
group decides for all its ranks, by its own layouts and threads. If calls of a process differ only
in layouts and threads, all of them use the first choice. Results are kept in AXONN_CACHE_DIR.

The products (local matrix multiplications) of a Linear with algorithm="auto" are chosen in the same
way. They are computed by "direct" (the library's call, the default), "transposed", "relayout_a",
"relayout_b" or, on GPUs, by a kernel that AXONN_PRODUCT_KERNELS allows: "cublaslt_<algorithm>",
"triton_<config>", "fused_sm90". Candidates whose errors exceed rounding are not measured. The
signatures of products begin with mm_forward, mm_dgrad and mm_wgrad. `tune_product` chooses for one
product ahead of its first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from axonn_ext.kernels import extension

PASSES = ("forward", "dgrad", "wgrad")

__all__ = ["PASSES", "Choice", "choices", "clear", "tune_product", "warm_up"]


@dataclass(frozen=True)
class Choice:
    """The algorithm that "auto" uses in calls of one signature in one group.

    group      the c10d name of the group; empty for a product, which is local to this rank
    source     "measured" by this process, read from "disk", or "default" if never measured
    median_us  algorithm -> slowest rank's time; empty if never measured
    """

    group: str
    signature: str
    algorithm: str
    source: str
    median_us: dict[str, float]


@contextmanager
def warm_up() -> Iterator[None]:
    """Measures, while entered, every call with algorithm="auto" that was never measured.

    Before the call itself, the op runs on the call's own arguments with every algorithm, at least
    six times each and for about 0.2 s in all. A matmul that was called before the warm-up is
    measured at its second call inside. A Linear that was called before keeps its default until
    `clear()` is called on all ranks.

    All ranks should enter it. In a group where only some do, rank 0 decides for signatures that are
    new to all ranks, and signatures that were called before keep their default. A warm-up applies
    to all threads of the process, and can be nested.
    """
    extension.enter_warm_up()
    try:
        yield
    finally:
        extension.leave_warm_up()


def tune_product(
    a: Tensor, b: Tensor, *, product_pass: str, bias: Tensor | None = None
) -> Choice | None:
    """Chooses how Linears compute the product a @ b (+ bias), and returns the choice.

    The choice is read from disk or, if it is not there, measured now. a [M, K], b [K, N] and
    bias [N] must be laid out as in the pass: forward x @ W.T, dgrad dy @ W, wgrad dy.T @ x.
    Returns None for a product for which Linears make no choice, because it is empty or, on the CPU,
    too small.

    Raises ValueError or TypeError for a pass that does not exist or tensors that do not fit.
    """
    if product_pass not in PASSES:
        raise ValueError(f"product_pass must be one of {', '.join(PASSES)}, got {product_pass!r}")
    with warm_up():
        signature = torch.ops.axonn._tune_mm(a, b, bias, f"mm_{product_pass}")
    alone = (c for c in choices() if not c.group and c.signature == signature)
    return next(alone, None)


def choices() -> list[Choice]:
    """Returns the choice for every signature that this process has called, in every live group."""
    return [
        Choice(group, signature, algorithm, source, dict(median_us))
        for group, signature, algorithm, source, median_us in extension.tuning_choices()
    ]


def clear() -> None:
    """Forgets all `choices()`; results on disk are kept.

    All ranks must call it between the same calls, because the next call of each signature asks
    rank 0 again.
    """
    extension.clear_tuning_choices()
