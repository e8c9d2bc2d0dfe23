"""Checks and times all ways on one vocabulary. A wrong result gets no time."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from axonn_ext.bench.loss.memory import peak_bytes
from axonn_ext.bench.loss.results import LossRow
from axonn_ext.bench.loss.systems import SYSTEMS, TORCH, Batch, bind, worst_error
from axonn_ext.calibrate.measure import Timing, measure, ranks_of, synchronize_with
from axonn_ext.calibrate.this_machine import DTYPES
from axonn_ext.grid import Grid

COPY = "copy"
PASSES = 3  # over the logits: two that read and one that writes
COPY_PASSES = 2
# An exponential of fp32 errs by some 1e-6, that of a sum over many columns included.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Case:
    """What is timed: the sizes, the dtype by its short name, and where."""

    rows: int
    vocab: int
    dtype: str
    device: str


def error_limit(dtype: str) -> float:
    """Returns the error that rounding explains: of the arithmetic, and of the gradient once."""
    eps = torch.finfo(DTYPES[dtype]).eps
    return eps + (1e-12 if dtype == "fp64" else ROUNDING)


def run_case(
    case: Case, grid: Grid, *, rounds: int, on_round: Callable[[], None] = lambda: None
) -> list[LossRow]:
    """Returns a row for each way. Each is checked, then counted, then all are timed in turns."""
    dtype, limit = DTYPES[case.dtype], error_limit(case.dtype)
    batch = Batch.draw(case.rows, case.vocab, dtype, case.device)
    errors: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for system in SYSTEMS:
        own = Batch(batch.logits.clone(), batch.labels)
        call = bind(system, own, grid)
        errors[system] = worst_error(call(), batch.for_system(system))
        peaks[system] = peak_bytes(call, case.device)
        del own, call
        gc.collect()
    right = [system for system in SYSTEMS if errors[system] <= limit]
    scratch = Batch(batch.logits.clone(), batch.labels)  # which the call in place overwrites
    calls: dict[str, Callable[[], object]] = {
        COPY: lambda: scratch.logits.copy_(batch.logits),
        **{system: bind(system, scratch, grid) for system in right},
    }
    timings = measure(
        calls, ranks_of(case.device), rounds=rounds, on_round=on_round,
        synchronize=synchronize_with(case.device),
    )  # fmt: skip
    return [
        _row(case, system, errors[system], peaks[system], timings, rounds) for system in SYSTEMS
    ]


def _row(
    case: Case, system: str, error: float, peak: int, timings: dict[str, Timing[object]],
    rounds: int,
) -> LossRow:  # fmt: skip
    timing, plain = timings.get(system), timings.get(TORCH)
    copy_us = timings[COPY].median_us
    floor_us = copy_us * PASSES / COPY_PASSES
    return LossRow(
        op="loss",
        device=case.device,
        dtype=case.dtype,
        rows=case.rows,
        vocab=case.vocab,
        system=system,
        correct=timing is not None,
        median_us=timing.median_us if timing else None,
        iqr_us=timing.iqr_us if timing else None,
        min_us=timing.min_us if timing else None,
        copy_us=copy_us,
        floor_us=floor_us,
        ratio_to_floor=timing.median_us / floor_us if timing else None,
        speedup=plain.median_us / timing.median_us if timing and plain else None,
        peak_bytes=peak,
        peak_over_logits=peak / (case.rows * case.vocab * DTYPES[case.dtype].itemsize),
        rel_error=error if math.isfinite(error) else None,
        error_limit=error_limit(case.dtype),
        rounds=rounds,
        threads=torch.get_num_threads(),
    )
