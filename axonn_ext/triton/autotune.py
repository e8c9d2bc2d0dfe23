"""Which tile config a shape class gets: measured once, kept on disk, else the heuristic's.

    tuner = Tuner(measure=True)
    matmul(x, w, tuner=tuner)          measures the class of this call, if it was never measured
    matmul(x, w, tuner=tuner)          and from then on takes the winner

A Tuner is an object like any other: who wants one choice for a whole process passes one around.
Files are those of axonn_ext.tuning (AXONN_CACHE_DIR): one a signature, written whole under another
name and renamed, so that of several writers the last one wins and readers see a whole file or none;
kept apart by models of processor and GPUs and by the versions of torch and axonn_ext, and here of
triton, too.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from axonn_ext import _library
from axonn_ext.triton.launch import interpreting
from axonn_ext.triton.tile_configs import (
    DeviceLimits,
    Problem,
    TileConfig,
    best_config,
    candidates,
    legal_configs,
    shape_class,
    why_illegal,
)

# Of the legal configs, how many are measured: those that the model ranks first. Compiling one takes
# about a second, and the model is not wrong by a factor.
NUM_MEASURED = 12
WARM_UP_CALLS = 3
BATCHES = 7
BATCH_US = 2000.0
FLUSH_BYTES = 128 << 20  # more than any L2 cache: each batch starts with a cold one

Run = Callable[[TileConfig], Tensor]
Measure = Callable[[Sequence[TileConfig], torch.device, Run], dict[TileConfig, float]]


@dataclass(frozen=True)
class Choice:
    """The config of a shape class."""

    signature: str
    config: TileConfig
    source: str  # "measured" by this process, from "disk", or "default": the heuristic's
    median_us: dict[str, float] = field(default_factory=dict)  # by name of the config


def measure_on_gpu(
    configs: Sequence[TileConfig], device: torch.device, run: Run
) -> dict[TileConfig, float]:
    """Median microseconds of each config, between two events on the current stream.

    All configs run in turns, so that a clock that changes is unfair to none.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    calls: dict[TileConfig, int] = {}
    samples: dict[TileConfig, list[float]] = {config: [] for config in configs}
    for config in configs:
        for _ in range(WARM_UP_CALLS):
            run(config)
        calls[config] = max(1, int(BATCH_US / max(_elapsed_us(config, 1, run), 1.0)))
    for _ in range(BATCHES):
        for config in configs:
            flush.zero_()
            samples[config].append(_elapsed_us(config, calls[config], run))
    return {config: statistics.median(times) for config, times in samples.items()}


def _elapsed_us(config: TileConfig, num_calls: int, run: Run) -> float:
    """Microseconds of a call, as the mean of several; waits for these, and for nothing else."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_calls):
        run(config)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / num_calls


class Tuner:
    """Chooses configs, and remembers what it chose.

    measure  whether classes that were never measured may be: each takes some seconds, once. Never
             done in the interpreter or while a CUDA graph is captured; the heuristic serves then
    timer    how configs are timed: `measure_on_gpu`
    """

    def __init__(self, *, measure: bool = False, timer: Measure | None = None) -> None:
        self._measure = measure
        self._timer = timer
        self._choices: dict[str, Choice] = {}

    def choices(self) -> list[Choice]:
        """What was chosen so far, in the order in which classes were met."""
        return list(self._choices.values())

    def config_for(
        self, problem: Problem, limits: DeviceLimits, device: torch.device, run: Run
    ) -> TileConfig:
        """The config for the problem; `run(config)` makes the call, and may be called often."""
        signature = signature_of(problem, limits)
        choice = self._choices.get(signature)
        # A default gives way to a measurement as soon as one may be made.
        if choice is None or (choice.source == "default" and self._may_measure(device)):
            choice = _from_disk(signature, problem, limits)
            if choice is None and self._may_measure(device):
                choice = self._measured(signature, problem, limits, device, run)
            if choice is None:
                choice = Choice(signature, best_config(problem, limits), "default")
            self._choices[signature] = choice
        # Of a class, one problem may allow what another does not.
        legal = not why_illegal(choice.config, problem, limits)
        return choice.config if legal else best_config(problem, limits)

    def _may_measure(self, device: torch.device) -> bool:
        if not self._measure:
            return False
        if self._timer is not None:
            return True
        return not interpreting() and not (
            device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        )

    def _measured(
        self,
        signature: str,
        problem: Problem,
        limits: DeviceLimits,
        device: torch.device,
        run: Run,
    ) -> Choice:
        configs = legal_configs(problem, limits)[:NUM_MEASURED]
        if not configs:
            raise ValueError(f"no tile config is legal for {problem}")
        times = (self._timer or measure_on_gpu)(configs, device, run)
        winner = min(configs, key=lambda config: times[config])
        medians = {config.name: us for config, us in times.items()}
        problem_with_disk = _library.keep_measurement(signature, winner.name, list(medians.items()))
        _warn(problem_with_disk)
        return Choice(signature, winner, "measured", medians)


def signature_of(problem: Problem, limits: DeviceLimits) -> str:
    """What a measurement is kept under, beside the machine and the versions of torch and ours."""
    return f"{shape_class(problem, limits)} triton={triton.__version__}"


def _from_disk(signature: str, problem: Problem, limits: DeviceLimits) -> Choice | None:
    found, trouble = _library.find_measurement(signature)
    _warn(trouble)
    if found is None:
        return None
    name, medians = found
    every = candidates(problem.element_bytes, amd=limits.is_amd)
    by_name = {config.name: config for config in every}
    # One that another version of the list has left behind counts as none.
    return Choice(signature, by_name[name], "disk", dict(medians)) if name in by_name else None


def _warn(trouble: str) -> None:
    if trouble:
        warnings.warn(
            f"axonn_ext goes on without its cache of measurements (AXONN_CACHE_DIR): {trouble}",
            stacklevel=2,
        )
