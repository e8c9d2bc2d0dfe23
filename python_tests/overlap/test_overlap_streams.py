"""The lanes of a GPU, driven here by streams of the CPU that keep the books a GPU's would keep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from axonn_ext import GridShape
from axonn_ext.models import ParallelConfig
from axonn_ext.overlap import Orchestrator, Overlap, orchestrator
from axonn_ext.overlap.lane import Lane
from axonn_ext.overlap.stream_lane import StreamLane
from grids import grid_of
from model_cases import GPT2, LLAMA
from overlap_cases import LIMITS, Case, compare, diverge_on, linear, train

TWO_BY_TWO = GridShape(z=2, data=2)


class Stream:
    """Runs what it is given at once, and notes how far into each stream it has waited."""

    def __init__(self, device: object = None) -> None:
        self.seen = {id(self): 0}

    def wait_event(self, event: Event) -> None:
        for stream, count in event.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)

    def wait_stream(self, other: Stream) -> None:
        event = Event(Gpu())
        event.record(other)
        self.wait_event(event)


class Event:
    def __init__(self, gpu: Gpu, enable_timing: bool = False) -> None:
        self._gpu, self._times = gpu, enable_timing

    def record(self, stream: Stream) -> None:
        stream.seen[id(stream)] += 1
        self.seen = dict(stream.seen)
        self.at = time.monotonic()

    def query(self) -> bool:
        assert not self._gpu.capturing  # which a GPU forbids
        return not self._gpu.behind

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Event) -> float:
        assert self._times and end_event._times
        return (end_event.at - self.at) * 1e3


class Gpu:
    """What the lanes use of torch.cuda."""

    Stream = Stream

    def __init__(self) -> None:
        self.Event = partial(Event, self)
        self._current = [Stream()]
        self.capturing = False
        self.behind = False  # of the host

    def current_stream(self, device: object = None) -> Stream:
        return self._current[-1]

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        yield
        self._current.pop()


class Checked(StreamLane):
    """Sees that a collective runs behind what the program has given before, and a reader behind
    the collective."""

    def _start(
        self, signature: str, sequence: int, tensors: Any, start: Any, *, sent_bytes: int
    ) -> Any:
        program = self._gpu.current_stream()
        program.seen[id(program)] += 1  # the program writes the tensors here
        wrote = program.seen[id(program)]
        collective = super()._start(signature, sequence, tensors, start, sent_bytes=sent_bytes)
        assert self._stream.seen[id(program)] >= wrote, signature
        end, wait = self._stream.seen[id(self._stream)], collective.wait

        def wait_and_look() -> None:
            wait()
            assert self._gpu.current_stream().seen[id(self._stream)] >= end, signature
            assert program.seen[id(self._stream)] >= end, signature  # whose memory it is

        collective.wait = wait_and_look
        return collective


@contextmanager
def lanes_of_streams(gpu: Gpu, lane: type[Lane] = Checked) -> Iterator[None]:
    make = partial(lane, device=torch.device("cpu"), gpu=gpu)
    with mock.patch.object(orchestrator, "HostLane", make):
        yield


def compare_in_streams(case: Case) -> tuple[list[str], float]:
    with lanes_of_streams(Gpu()):
        return compare(TWO_BY_TWO, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(GPT2, ParallelConfig(recompute="full"), micro_batches=2),
        Case(LLAMA, dtype=torch.float64),
    ],
)
def test_the_same_bits_as_on_the_host(pool, case):
    for differing, error in pool(4).run(compare_in_streams, case):
        assert differing == []
        assert error < LIMITS[case.dtype]


def bits_of_both() -> list[str]:
    """What differs between lanes of the host and lanes of streams."""
    grid, case, overlap = grid_of(TWO_BY_TWO), Case(LLAMA), Overlap(prefetch=2, bucket_bytes=4096)
    on_host = train(grid, case, overlap)
    with lanes_of_streams(Gpu()):
        in_streams = train(grid, case, overlap)
    return [name for name in on_host if not torch.equal(on_host[name], in_streams[name])]


def test_lanes_of_the_host_and_of_streams_agree(pool):
    assert pool(4).run(bits_of_both) == [[]] * 4


def test_a_graph_captures_the_same_collectives(pool):
    for totals, untimed in pool(4).run(totals_with_and_without_capture):
        assert totals.keys() == untimed.keys()
        for axis, (tasks, num_bytes, busy) in totals.items():
            assert busy > 0
            checks = 1  # of the order, which a graph cannot make
            assert untimed[axis] == (tasks - checks, num_bytes - 2 * 8, 0.0)


def totals_with_and_without_capture() -> tuple[dict[str, Any], dict[str, Any]]:
    """Tasks, bytes and busy seconds of one step by axis; then while a graph is captured."""
    both = []
    for capturing in (False, True):
        gpu = Gpu()
        with lanes_of_streams(gpu):
            grid = grid_of(TWO_BY_TWO)
            model = torch.nn.Sequential(linear(grid, "a"), linear(grid, "b"))
            with Orchestrator(model) as run:
                gpu.capturing = capturing
                model(torch.ones(4, 16)).sum().backward()
                run.sync_gradients()
                gpu.capturing = False
                totals = run.totals()
        both.append({a: (t.num_tasks, t.bytes, t.busy) for a, t in totals.items()})
    return both[0], both[1]


def times_of_a_step_before_a_capture() -> dict[str, tuple[int, float, float]]:
    """By axis, of a step whose times are read only after a capture."""
    gpu, x = Gpu(), torch.ones(4, 16)
    with lanes_of_streams(gpu, StreamLane):
        grid = grid_of(TWO_BY_TWO)
        model = torch.nn.Sequential(linear(grid, "a"), linear(grid, "b"))
        run = Orchestrator(model)
        model(x).sum().backward()
        run._buckets.finish(run._parameters)
        run.end_step()
        gpu.behind = gpu.capturing = True
        model(x).sum().backward()
        run.sync_gradients()
        gpu.behind = gpu.capturing = False
        return {a: (t.num_tasks, t.busy, t.exposed) for a, t in run.totals().items()}


def use_a_weight_from(capture: bool) -> str:
    """What is said of a weight that was gathered before a capture, or in one that is over."""
    gpu, x = Gpu(), torch.ones(4, 16)
    with lanes_of_streams(gpu, StreamLane):
        model = torch.nn.Sequential(linear(grid_of(TWO_BY_TWO), "a"))
        run = Orchestrator(model)
        for gpu.capturing in (capture, not capture):
            try:
                with torch.no_grad():
                    model(x)  # the weight is kept: the pass may not be over
            except RuntimeError as error:
                return str(error)
        run.close()
    return ""


def test_what_is_left_when_a_capture_begins(pool):
    for totals in pool(4).run(times_of_a_step_before_a_capture):
        for tasks, busy, exposed in totals.values():
            assert tasks > 0 and busy > 0 and exposed >= 0
    for capture in (False, True):
        for message in pool(4).run(use_a_weight_from, capture):
            assert "0.weight" in message and "Orchestrator.end_step() comes before" in message


def read_elsewhere() -> list[bool]:
    """Whether the allocator hears of a second stream that reads, and of it only."""
    gpu, told = Gpu(), []
    with lanes_of_streams(gpu, StreamLane):
        run = Orchestrator(linear(grid_of(TWO_BY_TWO), "a"))
        other, lane, value = Stream(), run._lanes["data"], torch.ones(3)
        collective = lane.all_reduce(value, "something")
        with mock.patch.object(torch.Tensor, "record_stream", lambda *args: told.append(args)):
            collective.wait()
            before = len(told)
            with gpu.stream(other):
                collective.wait()
                collective.wait()
        seen = other.seen[id(lane._stream)] > 0
    return [before == 0, len(told) == 1, told[0][1] is other, seen]


def test_memory_is_kept_for_every_stream_that_reads(pool):
    assert pool(4).run(read_elsewhere) == [[True] * 4] * 4


def drop(started_in_capture: bool, dropped_in_capture: bool) -> tuple[bool, list[bool], int]:
    """What becomes of a collective that nobody waits for.

    Whether the program's stream waits for it; for each stream that the allocator hears of, whether
    it is the lane's; and how many later collectives have times.
    """
    gpu, told = Gpu(), []
    with lanes_of_streams(gpu, StreamLane):
        run = Orchestrator(linear(grid_of(TWO_BY_TWO), "a"))
        lane, program = run._lanes["data"], gpu.current_stream()
        before = lane.totals.num_tasks
        gpu.capturing = started_in_capture
        collective = lane.all_reduce(torch.ones(3), "something")
        end = lane._stream.seen[id(lane._stream)]
        gpu.capturing = dropped_in_capture
        with mock.patch.object(torch.Tensor, "record_stream", lambda *args: told.append(args)):
            del collective
        waits = program.seen.get(id(lane._stream), 0) >= end
        gpu.capturing = False
        lane.all_reduce(torch.ones(3), "something else").wait()
        counted = lane.totals.num_tasks - before
    return waits, [stream is lane._stream for _, stream in told], counted


@pytest.mark.parametrize(
    ("started", "dropped", "waits", "told"),
    [
        (False, False, True, []),
        (True, True, True, []),
        (False, True, False, [True]),  # a captured stream must not wait for what is outside
        (True, False, False, []),  # the memory is the graph's
    ],
)
def test_a_collective_that_is_dropped_keeps_its_memory_until_it_is_done(
    pool, started, dropped, waits, told
):
    assert pool(4).run(drop, started, dropped) == [(waits, told, 2)] * 4


def diverge() -> tuple[str, str]:
    with lanes_of_streams(Gpu(), StreamLane):
        return diverge_on("cpu", TWO_BY_TWO)


def test_ranks_that_differ_learn_of_it_a_step_later(pool):
    for first, second in pool(4).run(diverge):
        assert first == ""
        assert "axis data" in second and "ranks have issued different collectives" in second
