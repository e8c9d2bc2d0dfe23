"""The lanes of a GPU, with CPU streams that track dependencies as a GPU's streams would."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from axonn_ext import _C, GridShape, trace_communication
from axonn_ext.models import ParallelConfig
from axonn_ext.overlap import CommunicationError, Orchestrator, Overlap, orchestrator
from axonn_ext.overlap.busy_sms import BusySms
from axonn_ext.overlap.lane import Lane
from axonn_ext.overlap.stream_lane import StreamLane
from axonn_ext.overlap.transport import C10dTransport, NcclTransport, Transport
from axonn_ext.overlap.watch import Watch
from axonn_ext.ranks.grid import AxisGroup
from fake_communicators import FakeCommunicators
from grids import grid_of
from model_cases import GPT2, LLAMA
from overlap_cases import LIMITS, Case, compare, diverge_on, linear, train

TWO_BY_TWO = GridShape(z=2, data=2)
SMS = 12  # used by a collective


class Stream:
    """Runs its work at once, and records up to which point of each stream it has waited."""

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
        assert not self._gpu.capturing  # forbidden on a GPU
        return not self._gpu.behind

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Event) -> float:
        assert self._times and end_event._times
        return (end_event.at - self.at) * 1e3


class Gpu:
    """The parts of torch.cuda that the lanes use."""

    Stream = Stream

    def __init__(self) -> None:
        self.Event = partial(Event, self)
        self._current = [Stream()]
        self.capturing = False
        self.behind = False  # whether it lags behind the host

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
    """Asserts that a collective runs after the program's earlier work, and readers after the
    collective."""

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
            assert program.seen[id(self._stream)] >= end, signature  # the memory belongs to it

        collective.wait = wait_and_look
        return collective


@contextmanager
def lanes_of_streams(
    gpu: Gpu,
    lane: type[StreamLane] = Checked,
    transport_of: Callable[[AxisGroup], Transport] = C10dTransport,
) -> Iterator[None]:
    def make(axis: AxisGroup, lanes: Any, watch: Watch) -> Lane:
        transport = transport_of(axis)
        device = torch.device("cpu")
        busy = BusySms(device, sms=SMS)
        return lane(axis, lanes, watch, transport=transport, device=device, busy=busy, gpu=gpu)

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
    """Results that differ between host lanes and stream lanes."""
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
            checks = 1  # of the order; a graph has none
            assert untimed[axis] == (tasks - checks, num_bytes - 2 * 8, 0.0)


def totals_with_and_without_capture() -> tuple[dict[str, Any], dict[str, Any]]:
    """Tasks, bytes and busy seconds of one step by axis, without and with capture in a graph."""
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


def free_sms_of_a_step() -> tuple[set[int], int]:
    """The SMs that GEMMs in forward and backward leave free, and those left free after the step."""
    gpu, seen = Gpu(), set()
    with lanes_of_streams(gpu, StreamLane):
        grid = grid_of(TWO_BY_TWO)
        model = torch.nn.Sequential(*(linear(grid, name) for name in "abc"))
        for layer in model:
            layer.register_forward_hook(lambda *_: seen.add(_C.free_sms_on(0)))
            layer.register_full_backward_hook(lambda *_: seen.add(_C.free_sms_on(0)))
        with Orchestrator(model, Overlap(prefetch=1, bucket_bytes=64)) as run:
            for _ in range(2):
                gpu.behind = True  # so no work is done yet
                model(torch.ones(4, 16, requires_grad=True)).sum().backward()
                gpu.behind = False  # the host waits for the previous step
                run.sync_gradients()
            return seen, _C.free_sms_on(0)


def test_gemms_leave_sms_to_the_collectives_that_are_under_way(pool):
    for seen, after in pool(4).run(free_sms_of_a_step):
        assert max(seen) == 2 * SMS  # for z and data
        assert after == 0


def times_of_a_step_before_a_capture() -> dict[str, tuple[int, float, float]]:
    """Tasks and times by axis, of a step whose times are read only after a capture."""
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
    """The error for a weight that was gathered before a capture, or in one that has ended."""
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
            assert "0.weight" in message and "call Orchestrator.end_step() before" in message


def read_elsewhere() -> list[bool]:
    """Whether the allocator is told about a second stream that reads, and only about this one."""
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
    """Drops a collective without waiting for it.

    Returns whether the program's stream waits for it; for each stream that the allocator is told
    about, whether it is the lane's; and the number of collectives with times.
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
        (False, True, False, [True]),  # a captured stream must not wait for work outside the graph
        (True, False, False, []),  # the memory belongs to the graph
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


# --- Over communicators of our own ---------------------------------------------------------------


class OnOurs(Checked):
    """Asserts that its transport is used only on the lane's stream."""

    calls: list[str]

    def __init__(self, axis: AxisGroup, lanes: Any, watch: Watch, **options: Any) -> None:
        self.calls = []
        ours = FakeCommunicators({axis.axis: axis.process_group}, self._look)
        options["transport"] = NcclTransport(axis, ours)
        super().__init__(axis, lanes, watch, **options)
        self.ours = ours

    def _look(self, call: str) -> None:
        assert self._gpu.current_stream() is self._stream
        self.calls.append(call)


def bits_and_traces_of_both(case: Case) -> tuple[list[str], list[Any], set[str]]:
    """Results that differ between the transports, the trace of each, and the calls of ours."""
    results, traces, calls = [], [], set()
    for lane in (Checked, OnOurs):
        seen: list[Any] = []
        with lanes_of_streams(Gpu(), partial(_kept, lane, seen)), trace_communication() as trace:
            results.append(train(grid_of(TWO_BY_TWO), case, Overlap(prefetch=2, bucket_bytes=4096)))
        calls |= {call for one in seen for call in getattr(one, "calls", ())}
        key = lambda r: (r.axis, r.collective, r.bytes_per_rank, r.dtype, r.group_size)  # noqa: E731
        traces.append([key(record) for record in trace.records])
    differing = [name for name in results[0] if not torch.equal(results[0][name], results[1][name])]
    return differing, traces, calls


def _kept(lane: type[StreamLane], seen: list[Any], *args: Any, **options: Any) -> StreamLane:
    seen.append(lane(*args, **options))
    return seen[-1]


def test_ours_and_c10d_agree_in_bits_and_in_the_trace(pool):
    case = Case(LLAMA, dtype=torch.float64)
    for differing, (c10d, ours), calls in pool(4).run(bits_and_traces_of_both, case):
        assert differing == []
        assert len(c10d) > 50 and c10d == ours
        assert calls == {"all_gather", "all_to_all", "all_reduce", "wait"}


def fail_with(when: str) -> list[str]:
    """This rank's errors after all communicators were aborted."""
    gpu = Gpu()
    with lanes_of_streams(gpu, OnOurs):
        run = Orchestrator(linear(grid_of(TWO_BY_TWO), "a"))
        lane, heard = run._lanes["data"], []
        lane.all_reduce(torch.ones(3), "something").wait()
        lane.start_check()
        gpu.behind = when == "waiting"
        lane.ours.failure = "axis z: call 7, all_gather float32[3], is not done after 3 s\nmore"
        for act in (lane.settle, partial(lane.all_reduce, torch.ones(3), "something else")):
            try:
                act()
            except CommunicationError as error:
                heard.append(str(error))
            gpu.behind = False
    return heard


@pytest.mark.parametrize("when", ["done", "waiting"])
def test_an_abort_is_an_error_of_settle_and_of_the_next_collective(pool, when):
    """The GPU passes the event of an aborted collective, whose result is meaningless."""
    for rank, heard in enumerate(pool(4).run(fail_with, when)):
        settled, issued = heard
        for message in heard:
            assert f"axis data, rank {rank} " in message
            assert "axis z: call 7, all_gather float32[3], is not done after 3 s" in message
        assert "the order of collectives" in settled and "something else" in issued


@pytest.mark.parametrize("options", [{"communicators": "own"}, {"max_ctas": 4}])
def test_options_of_gpus_are_refused_on_the_cpu(pool, options):
    for message in pool(4).run(refused_on_the_cpu, options):
        assert "is for GPUs, but the parameters lie on the cpu" in message


def refused_on_the_cpu(options: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="Orchestrator: communicators=") as error:
        Orchestrator(linear(grid_of(TWO_BY_TWO), "a"), Overlap(**options))
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"communicators": "nccl"}, "communicators must be one of auto, own, c10d, got 'nccl'"),
        ({"max_ctas": -1}, "max_ctas must be a whole number >= 0, got -1"),
        ({"communicators": "c10d", "max_ctas": 4}, "max_ctas=4 needs communicators 'own' or"),
    ],
)
def test_what_overlap_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        Overlap(**options)
