"""Chooses the tile config of a shape class: measured once and kept on disk, or the heuristic's.

    tuner = Tuner(measure=True)
    matmul(x, w, tuner=tuner)          measures the class of this call, if it was never measured
    matmul(x, w, tuner=tuner)          and from then on takes the winner

To have one choice for a whole process, pass the same Tuner everywhere.
Results are kept in AXONN_CACHE_DIR like those of axonn_ext.tuning, with a file for each signature.
A file is written under another name and renamed, so that the last of several writers wins, and
readers see a whole file or none. Results are kept apart by models of processor and GPUs, and by
versions of torch, axonn_ext and triton.
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

# So many legal configs are measured, those that the model ranks first. Compiling a config takes
# about a second, and the model is not wrong by a large factor.
NUM_MEASURED = 12
WARM_UP_CALLS = 3
BATCHES = 7
BATCH_US = 2000.0
FLUSH_BYTES = 128 << 20  # more than any L2 cache, so that each batch starts with a cold cache

Run = Callable[[TileConfig], Tensor]
Measure = Callable[[Sequence[TileConfig], torch.device, Run], dict[TileConfig, float]]


@dataclass(frozen=True)
class Choice:
    """The config of a shape class."""

    signature: str
    config: TileConfig
    source: str  # "measured" by this process, read from "disk", or "default" for the heuristic's
    median_us: dict[str, float] = field(default_factory=dict)  # name of a config -> its time


def measure_on_gpu(
    configs: Sequence[TileConfig], device: torch.device, run: Run
) -> dict[TileConfig, float]:
    """Returns the median microseconds of each config, between two events on the current stream.

    All configs run in turns, so that a changing clock rate affects all of them alike.
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
    """Returns the mean microseconds of several calls, and waits only for these calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_calls):
        run(config)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / num_calls


class Tuner:
    """Chooses configs, and remembers its choices.

    measure  whether it may measure classes that were never measured, which takes some seconds for
             each. In the interpreter, and while a CUDA graph is captured, it uses the heuristic
    timer    the function that times configs, such as `measure_on_gpu`
    """

    def __init__(self, *, measure: bool = False, timer: Measure | None = None) -> None:
        self._measure = measure
        self._timer = timer
        self._choices: dict[str, Choice] = {}

    def choices(self) -> list[Choice]:
        """Returns the choices so far, in the order in which classes were first used."""
        return list(self._choices.values())

    def config_for(
        self, problem: Problem, limits: DeviceLimits, device: torch.device, run: Run
    ) -> TileConfig:
        """Returns the config for the problem; `run(config)` makes the call, and may run often."""
        signature = signature_of(problem, limits)
        choice = self._choices.get(signature)
        # A default is replaced as soon as the class may be measured.
        if choice is None or (choice.source == "default" and self._may_measure(device)):
            choice = _from_disk(signature, problem, limits)
            if choice is None and self._may_measure(device):
                choice = self._measured(signature, problem, limits, device, run)
            if choice is None:
                choice = Choice(signature, best_config(problem, limits), "default")
            self._choices[signature] = choice
        # A config may be legal for one problem of a class, but not for another.
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
    """Returns the key of a measurement, to which the machine and versions of software are added."""
    return f"{shape_class(problem, limits)} triton={triton.__version__}"


def _from_disk(signature: str, problem: Problem, limits: DeviceLimits) -> Choice | None:
    found, trouble = _library.find_measurement(signature)
    _warn(trouble)
    if found is None:
        return None
    name, medians = found
    every = candidates(problem.element_bytes, amd=limits.is_amd)
    by_name = {config.name: config for config in every}
    # A config that is no longer in the list is ignored.
    return Choice(signature, by_name[name], "disk", dict(medians)) if name in by_name else None


def _warn(trouble: str) -> None:
    if trouble:
        warnings.warn(
            f"axonn_ext goes on without its cache of measurements (AXONN_CACHE_DIR): {trouble}",
            stacklevel=2,
        )
