"""Measures how long steps wait for communication and how much time overlap saves."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from axonn_ext import _C
from axonn_ext.overlap import Orchestrator
from axonn_ext.overlap.clock import StreamClock
from axonn_ext.ranks.grid import Grid
from axonn_ext.ranks.tracing import waited_seconds
from axonn_ext.spec.grid import AXES
from axonn_ext.terminal.files import writing
from axonn_ext.train.run_folder import MEMORY_FILE

# These steps run alternately with and without overlap. The first step is left out, because it
# includes one-time work.
_FIRST_COMPARED, _LAST_COMPARED = 2, 9
_NUM_PROFILED = 3
_MEMORY_EVENTS = 100_000  # allocations and frees of a snapshot: the latest
_Mark = float | torch.Event  # a float on the CPU, an event on a GPU


class Exposure:
    """Watches the steps of one rank, counted from 1.

    If overlap is on and the run has 10 steps or more, steps 2, 4, 6 and 8 wait for every collective
    at once. The results are bitwise the same; the extra time shows how much overlap saves. A
    profile covers the three steps after the compared ones; in a run of 10 or 11 steps it covers the
    last three, and only steps before these are compared. On a GPU, a snapshot of torch's memory, in
    memory.pickle next to the profile, has the allocations of the same steps.

    waited_for_messages: returns the seconds for which the rank has waited for messages from other
    pipeline stages.
    """

    def __init__(
        self,
        grid: Grid,
        orchestrator: Orchestrator | None,
        *,
        num_steps: int,
        profile: Path | None = None,
        device: str = "cpu",
        waited_for_messages: Callable[[], float] | None = None,
    ) -> None:
        self._orchestrator, self._waited_for_messages = orchestrator, waited_for_messages
        num_profiled = min(_NUM_PROFILED, max(1, num_steps - 1)) if profile else 0
        self._compares = orchestrator is not None and num_steps > _LAST_COMPARED
        last = min(_LAST_COMPARED, num_steps - num_profiled) if self._compares else 1
        self._compared = range(_FIRST_COMPARED, last + 1)
        self._axes = {grid.axis(axis).name: axis for axis in AXES if grid.size(axis) > 1}
        self._clock = None if device == "cpu" else StreamClock(torch.device(device))
        self._profile = profile
        first = min(last + 1, num_steps)
        self._profiled = range(first, first + num_profiled)
        self._spans: list[tuple[str, _Mark, _Mark, dict[str, float]]] = []
        # Seconds by axis: waits inside ops, waits of the orchestrator, and busy time of its lanes.
        self._waited: dict[str, float] = defaultdict(float)
        self._exposed: dict[str, float] = defaultdict(float)
        self._busy: dict[str, float] = {}
        self._num_steps = 0
        # Keyed by whether the step waited for every collective at once.
        self._step_seconds: dict[bool, list[float]] = {True: [], False: []}
        self._recording = False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Wraps one step, including the optimizer."""
        at_once = number in self._compared and number % 2 == 0
        if self._orchestrator is not None:
            self._orchestrator.set_wait_at_once(at_once)
            self._orchestrator.record(number in self._profiled)
        self._recording = number in self._profiled
        if self._recording and number == self._profiled[0] and self._clock is not None:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS, stacks="python")
        before = self._waited_in_ops(), *self._lanes_so_far()
        began = time.perf_counter()
        yield
        if number in self._compared:
            self._step_seconds[at_once].append(time.perf_counter() - began)
        if number > 1 and not at_once:
            self._num_steps += 1
            after = self._waited_in_ops(), *self._lanes_so_far()
            sums = self._waited, self._exposed, self._busy
            for total, old, new in zip(sums, before, after, strict=True):
                for axis, seconds in new.items():
                    total[axis] = total.get(axis, 0.0) + seconds - old[axis]
        if self._recording and number == self._profiled[-1]:
            self._write_profile()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Wraps a part of a step, which becomes an entry in the profile."""
        if not self._recording:
            yield
            return
        waited, began = self._waited_in_ops(), self._now()
        yield
        details = {}
        if self._clock is None:
            for axis, total in self._waited_in_ops().items():
                details[f"waited_for_{axis}_in_ops_ms"] = (total - waited[axis]) * 1e3
        self._spans.append((name, began, self._now(), details))

    def summary(self) -> list[str]:
        """Returns lines for the user at the end of the run; none if there was no communication."""
        if not self._axes or not self._num_steps:
            return []
        lines, known = ["communication per step:"], set(self._axes.values())
        if self._clock is not None:  # on a GPU, streams wait, so waits inside ops are not measured
            if not self._busy:
                return ["communication per step: inside ops, where it is not measured on GPUs"]
            lines = ["communication per step (inside ops it is not measured on GPUs):"]
            known = set(self._busy)
        for axis in reversed(AXES):
            if axis in known:
                exposed = self._waited[axis] + self._exposed[axis]
                line = f"  {axis:<4}  {exposed / self._num_steps * 1e3:8.2f} ms exposed"
                if axis == "pipe":
                    line += ", bubbles included"
                if axis in self._busy:
                    line += f"  {self._hidden(axis) / self._num_steps * 1e3:8.2f} ms hidden"
                lines.append(line)
        return lines + self._verdict()

    def waited(self) -> float:
        """Returns the seconds for which this rank has waited so far, in calls along any axis.

        On GPUs only the orchestrator's waits are known.
        """
        return sum(self._waited_in_ops().values()) + sum(self._lanes_so_far()[0].values())

    def _verdict(self) -> list[str]:
        """Returns lines on whether overlap, if it is on, has saved time."""
        if self._orchestrator is None:
            return []
        off = "--overlap.mode off runs what shared memory can do inside the ops"
        if self._compares:
            from statistics import median  # loads five modules

            on, at_once = median(self._step_seconds[False]), median(self._step_seconds[True])
            numbers = f"{on * 1e3:.1f} ms a step, {at_once * 1e3:.1f} ms without overlap"
            if on < at_once:
                return [f"overlap gains {1 - on / at_once:.0%} of the step: {numbers}"]
            return [f"warning: overlap is on and does not help: {numbers}; {off}"]
        if not any(self._hidden(axis) for axis in self._busy):
            return [f"warning: overlap is on and hides nothing; {off}"]
        return []

    def _hidden(self, axis: str) -> float:
        """Returns the seconds in which the axis's lane was busy and the program did not wait."""
        return max(0.0, self._busy[axis] - self._exposed[axis])

    def _lanes_so_far(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the orchestrator's waits and its lanes' busy time, in seconds by axis."""
        totals = self._orchestrator.totals() if self._orchestrator is not None else {}
        exposed = {axis: total.exposed for axis, total in totals.items()}
        return exposed, {axis: total.busy for axis, total in totals.items()}

    def _waited_in_ops(self) -> dict[str, float]:
        by_group = waited_seconds()
        waited = {axis: by_group.get(name, 0.0) for name, axis in self._axes.items()}
        if "pipe" in waited and self._waited_for_messages is not None:
            waited["pipe"] += self._waited_for_messages()
        return waited

    def _write_profile(self) -> None:
        from axonn_ext.overlap.chrome_trace import Span, write_chrome_trace

        assert self._profile is not None
        spans = [
            Span(name, self._seconds(begin), self._seconds(end), details)
            for name, begin, end, details in self._spans
        ]
        lanes = self._orchestrator.take_records() if self._orchestrator is not None else {}
        with writing("--out", self._profile):
            write_chrome_trace(self._profile, compute=spans, lanes=lanes)
        if self._clock is not None:
            memory = self._profile.with_name(MEMORY_FILE)
            with writing("--out", memory):
                torch.cuda.memory._dump_snapshot(str(memory))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _now(self) -> _Mark:
        """Marks the current time on the computing device: the host or a GPU's stream."""
        if self._clock is None:
            return _C.Lanes.now()
        return self._clock.mark(torch.cuda.current_stream())

    def _seconds(self, mark: _Mark) -> float:
        if isinstance(mark, float):
            return mark
        assert self._clock is not None
        mark.synchronize()
        return self._clock.seconds(mark)
