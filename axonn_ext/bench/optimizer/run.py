"""Checks all systems against each other, bit for bit, and times them. Other bits get no time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from axonn_ext.bench.optimizer.results import OptimizerRow
from axonn_ext.bench.optimizer.systems import (
    CPU,
    DISK,
    FP32,
    SYSTEMS,
    TORCH,
    Case,
    System,
    build,
    drawn,
    moved_bytes,
)
from axonn_ext.calibrate.measure import Timing, measure, ranks_of, synchronize_with

CHECKED_STEPS = 3
_INTEGERS = {2: torch.int16, 4: torch.int32}  # of the width of a dtype, in bytes


def run_case(
    case: Case, *, rounds: int, on_round: Callable[[], None] = lambda: None
) -> list[OptimizerRow]:
    """Returns a row for each system. All are checked, then those that are right take turns.

    Raises OSError where the disk has no room.
    """
    gradients = drawn(case, seed=1)
    systems = {name: build(name, case, gradients) for name in SYSTEMS}
    right = right_systems(systems, gradients, case)
    calls = {name: systems[name].step for name in right}
    timings = measure(
        _passes(case) | calls, ranks_of(case.device), rounds=rounds, on_round=on_round,
        synchronize=synchronize_with(case.device),
    )  # fmt: skip
    return [_row(case, name, systems[name], timings, rounds) for name in SYSTEMS]


def right_systems(systems: dict[str, System], gradients: Sequence[Tensor], case: Case) -> list[str]:
    """Returns the systems whose weights have the bits of torch's after a few steps of all."""
    for step in range(CHECKED_STEPS):
        for gradient, new in zip(gradients, drawn(case, seed=1 + step), strict=True):
            gradient.copy_(new)
        for system in systems.values():
            system.take()
            system.step()
    expected = systems[TORCH].weights()
    return [name for name, system in systems.items() if _same_bits(system.weights(), expected)]


def _same_bits(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether all elements have the same bits, and none is NaN or infinite."""
    return all(
        bool(one.isfinite().all())
        and torch.equal(one.view(_INTEGERS[one.itemsize]), other.view(_INTEGERS[other.itemsize]))
        for one, other in zip(ones, others, strict=True)
    )


def pass_bytes(case: Case) -> int:
    """Returns what a pass over an fp32 number for each element reads and writes."""
    return 2 * FP32 * case.elements


def _passes(case: Case) -> dict[str, Callable[[], object]]:
    """Returns a pass in the memory of the device, and one in that of the host.

    A pass changes its numbers in place, as AdamW does. A copy would be slower on a CPU, which first
    fetches what a copy overwrites.
    """
    numbers = {
        where: torch.ones(case.elements, device=where)
        for where in dict.fromkeys((case.device, "cpu"))
    }
    return {_pass_on(where): partial(ones.mul_, 1.0) for where, ones in numbers.items()}


def _pass_on(where: str) -> str:
    return f"pass on {where}"


def _row(
    case: Case, name: str, system: System, timings: dict[str, Timing[object]], rounds: int
) -> OptimizerRow:
    timing, torchs = timings.get(name), timings.get(TORCH)
    where = "cpu" if name in (CPU, DISK) else case.device
    pass_us, moved = timings[_pass_on(where)].median_us, moved_bytes(name, case)
    floor_us = pass_us * moved / pass_bytes(case)
    return OptimizerRow(
        op="optimizer",
        device=case.device,
        dtype=case.dtype,
        elements=case.elements,
        bucket_elements=case.bucket_elements,
        system=name,
        correct=timing is not None,
        median_us=timing.median_us if timing else None,
        iqr_us=timing.iqr_us if timing else None,
        min_us=timing.min_us if timing else None,
        elements_per_ns=case.elements / timing.median_us / 1e3 if timing else None,
        vs_torch=_ratio(torchs, timing) if timing and torchs else None,
        pass_us=pass_us,
        pass_bytes=pass_bytes(case),
        moved_bytes=moved,
        floor_us=floor_us,
        ratio_to_floor=timing.median_us / floor_us if timing else None,
        device_bytes=system.num_bytes.device,
        host_bytes=system.num_bytes.host,
        disk_bytes=system.num_bytes.disk,
        rounds=rounds,
        threads=torch.get_num_threads(),
    )


def _ratio(one: Timing[object], other: Timing[object]) -> float:
    """Returns the median of the ratios of the same rounds, which a slow spell affects least."""
    pairs = zip(one.samples_us, other.samples_us, strict=True)
    return statistics.median(a / b for a, b in pairs)
