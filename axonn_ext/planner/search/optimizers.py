"""AdamW's options to try: what is sharded over the data axis, and what is on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from axonn_ext.planner.job import Job, Options
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.optimizer import OptimizerOptions

_ZEROS, _OFFLOADS = (0, 1), ("none", "cpu")  # tried values, the simplest first


def tried_zeros(*values: int) -> tuple[int, ...]:
    """Returns these values of `zero` and all those that are always tried, in ascending order."""
    return tuple(sorted({*values, *_ZEROS}))


def tried_offloads(machine: Machine) -> tuple[str, ...]:
    """Returns the values of `offload` that a search tries on a machine, the simplest first.

    On a CPU, "cpu" is the same memory as without offload. "disk" is modelled like "cpu".
    """
    return _OFFLOADS if machine.device != "cpu" and machine.knows_host else _OFFLOADS[:1]


def optimizers_of(
    own: OptimizerOptions, zeros: Sequence[int], offloads: Sequence[str]
) -> tuple[OptimizerOptions, ...]:
    """Returns the options with each value of `zero` and `offload`, in the order of preference.

    Muon has no offload.
    """
    offloads = (own.offload,) if own.is_muon else offloads
    return tuple(replace(own, zero=z, offload=o) for o, z in product(offloads, zeros))


@lru_cache(maxsize=256)
def that_differ_on(
    grid: GridShape, optimizers: tuple[OptimizerOptions, ...]
) -> tuple[OptimizerOptions, ...]:
    """Returns the options that are legal and differ on the grid.

    With one data rank, ZeRO shards nothing; pipeline stages do not support zero=2. If none is
    legal, returns the first, which the search then reports as illegal.
    """
    legal = [o for o in optimizers if grid.pipe == 1 or o.zero < 2] or optimizers[:1]
    kinds: dict[OptimizerOptions, OptimizerOptions] = {}
    for optimizer in legal:
        same = optimizer if grid.data > 1 else replace(optimizer, zero=0)
        kinds.setdefault(same, optimizer)
    return tuple(kinds.values())


def with_each(job: Job, optimizers: tuple[OptimizerOptions, ...]) -> Iterator[Job]:
    """Yields the job with each of the options that differ on its grid."""
    for optimizer in that_differ_on(job.grid, optimizers):
        yield with_optimizer(job, optimizer)


def with_optimizer(job: Job, optimizer: OptimizerOptions) -> Job:
    """Returns the job with other options of AdamW."""
    if job.options.optimizer == optimizer:
        return job
    return Job(job.model, job.grid, options_with(job.options, optimizer), job.batch_size)


@lru_cache(maxsize=4096)
def options_with(options: Options, optimizer: OptimizerOptions) -> Options:
    """Returns the options of a job with other options of AdamW."""
    return replace(options, optimizer=optimizer)
