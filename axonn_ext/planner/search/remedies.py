"""Finds what would fit if nothing in a request does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

from axonn_ext.planner.estimate import simulate_step
from axonn_ext.planner.job import Job, violations
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.memory.peak import memory_on
from axonn_ext.planner.search.choices import fitting_with_some, jobs_of, variants_of
from axonn_ext.planner.search.optimizers import (
    optimizers_of,
    tried_offloads,
    tried_zeros,
    with_optimizer,
)
from axonn_ext.planner.search.request import MOST_RANKS, Request, in_ranks, unit_of
from axonn_ext.planner.simulation.pipelines import StageSteps
from axonn_ext.spec.optimizer import OptimizerOptions

NO_MEMORY = "does not fit in memory"
# How many smaller numbers of ranks are tried if no grid of the requested one is legal.
_SMALLER_TRIED = 64
# How many smaller and how many larger batches are tried if no grid divides the requested one.
_BATCHES_TRIED = 64


def smallest_that_fits(request: Request, *, least: int = 1) -> int | None:
    """Returns the smallest power of two >= `least` of ranks on which a legal configuration fits.

    Returns None if there is none.
    """
    ranks, most = 1 << (least - 1).bit_length(), _most_ranks(request.machine)
    while ranks <= most:
        if _some_that_fits(replace(request, num_ranks=ranks)) is not None:
            return ranks
        ranks *= 2
    return None


def _some_that_fits(request: Request) -> Job | None:
    """Returns some legal configuration that fits, or None."""
    if not _may_divide(request, request.num_ranks):
        return None
    for job in jobs_of(request):
        if next(violations(job), None) is None:
            fitting = fitting_with_some(request, job, variants_of(request, job))
            if fitting:
                return fitting[0]
    return None


def _may_divide(request: Request, num_ranks: int) -> bool:
    """Whether a grid of that many ranks may be legal; if not, none is for certain.

    In a legal grid x divides the key-value heads, y z the hidden size, and data the batch.
    """
    model = request.model
    divided = model.kv_heads * model.hidden_size * request.batch_size
    stages = range(1, request.max_pipe + 1)
    return any(num_ranks % pipe == 0 and divided % (num_ranks // pipe) == 0 for pipe in stages)


def nothing_fits(request: Request, rejected: Mapping[str, int]) -> str:
    """Returns why no configuration of the request can run, and what could."""
    return _what_would_do(request, rejected) + _with_other_optimizer(request, rejected)


def _with_other_optimizer(request: Request, rejected: Mapping[str, int]) -> str:
    """Says which ZeRO or offload would fit on the same ranks, what it frees and what it costs.

    The comparison is with the first options of AdamW that were tried.
    """
    for optimizer in _smaller(request) if NO_MEMORY in rejected else ():
        job = _some_that_fits(replace(request, optimizers=(optimizer,)))
        if job is not None:
            break
    else:
        return ""
    own = request.optimizers[0]
    before = with_optimizer(job, own)
    freed = memory_on(before, request.machine).total - memory_on(job, request.machine).total
    steps = StageSteps(request.machine)
    after_s, before_s = (
        simulate_step(each, request.machine, steps=steps).step_time_s for each in (job, before)
    )
    more_s = after_s - before_s
    changed = [
        f"{name} {getattr(optimizer, name)}"
        for name in ("zero", "offload")
        if getattr(optimizer, name) != getattr(own, name)
    ]
    cost = f"takes {more_s:.3g} s a step longer" if more_s > 0 else f"saves {-more_s:.3g} s a step"
    return (
        f". On {in_ranks(request.machine, request.num_ranks)}, {' and '.join(changed)} would do: "
        f"with {job.grid.short()} that frees {freed / 1e9:.3g} GB each and {cost} (modelled)"
    )


def _smaller(request: Request) -> Iterator[OptimizerOptions]:
    """Yields the options that keep less on a rank, the smallest change first."""
    own = request.optimizers[0]
    zeros = [zero for zero in tried_zeros(own.zero) if zero >= own.zero]
    on_device = own.offload == "none"
    offloads = tried_offloads(request.machine) if on_device else (own.offload,)
    for optimizer in optimizers_of(own, zeros, offloads):
        if optimizer not in request.optimizers:
            yield optimizer


def _what_would_do(request: Request, rejected: Mapping[str, int]) -> str:
    model, machine = request.model, request.machine
    if not rejected:
        return (
            f"no grid of {in_ranks(machine, request.num_ranks)} of {machine.name} and at most "
            f"{request.max_pipe} pipeline stages has {request.axes}; the sizes of all axes "
            "multiply to the number of ranks"
        )
    tried = "; ".join(f"{reason} ({count:,})" for reason, count in rejected.items())
    lacks_memory = NO_MEMORY in rejected
    each = f" ({request.memory_limit / 1e9:.3g} GB each to use)" if lacks_memory else ""
    text = (
        f"{request.model_name} ({_short(model.num_parameters())} parameters) cannot run on "
        f"{in_ranks(machine, request.num_ranks)} of {machine.name}{each} with a batch of "
        f"{request.batch_size:,} sequences: {tried}"
    )
    fewer = None if lacks_memory else _fewer_that_fit(request)
    power = None if lacks_memory else smallest_that_fits(request, least=request.num_ranks)
    if fewer is None and power is None:
        power = smallest_that_fits(request)
    batches = "" if lacks_memory else _batches_that_fit(request)
    if fewer is not None and power is not None:
        return f"{text}. {fewer:,} or {in_ranks(machine, power)} would do{batches}"
    if fewer is not None or power is not None:
        return f"{text}. {in_ranks(machine, fewer or power or 0)} would do{batches}"
    text += f". No power of two of {unit_of(machine)}s up to {_most_ranks(machine):,} does: take "
    if lacks_memory:
        return text + "a larger batch, shorter sequences, or a machine with more memory"
    return text + "a batch and a model with more divisors, or a machine with more memory"


def _fewer_that_fit(request: Request) -> int | None:
    """Returns the next smaller number of ranks on which a legal configuration fits, or None."""
    candidates = (n for n in range(request.num_ranks - 1, 0, -1) if _may_divide(request, n))
    for n in islice(candidates, _SMALLER_TRIED):
        if _some_that_fits(replace(request, num_ranks=n)) is not None:
            return n
    return None


def _batches_that_fit(request: Request) -> str:
    """Names the next smaller and larger batch for which the same ranks would do, or ""."""
    parts, own = request.micro_batches or (1,), request.batch_size
    found: list[int] = []
    for step in (-1, 1):
        sizes = (own + step * n for n in range(1, _BATCHES_TRIED + 1) if own + step * n >= 1)
        others = (
            replace(request, batch_size=size)
            for size in sizes
            if not any(size % number for number in parts)
        )
        legal = (r for r in others if _is_legal_whole(r))
        good = (r.batch_size for r in legal if _some_that_fits(r) is not None)
        found += islice(good, 1)
    if not found:
        return ""
    return f", and so would a batch of {' or '.join(f'{size:,}' for size in found)} sequences"


def _is_legal_whole(request: Request) -> bool:
    """Whether some grid divides the batch in one piece, or in the requested micro-batches.

    If not, none divides its micro-batches, whatever their number, since the batch is a multiple of
    each.
    """
    if not _may_divide(request, request.num_ranks):
        return False
    whole = replace(request, micro_batches=request.micro_batches or (1,))
    return any(next(violations(job), None) is None for job in jobs_of(whole))


def _most_ranks(machine: Machine) -> int:
    return MOST_RANKS if machine.max_ranks is None else min(machine.max_ranks, MOST_RANKS)


def _short(count: int) -> str:
    """Returns a number like "80.2 B" or "3.1 M"."""
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
