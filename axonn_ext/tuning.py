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
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from axonn_ext import _library

__all__ = ["Choice", "choices", "clear", "warm_up"]


@dataclass(frozen=True)
class Choice:
    """What "auto" stands for in calls of one signature on one group."""

    group: str  # its c10d name
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
