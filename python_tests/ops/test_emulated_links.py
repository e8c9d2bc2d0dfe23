"""Emulated links: collectives take their time, results stay right, and computation goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axonn_ext import Grid
from axonn_ext.kernels import extension
from axonn_ext.overlap.host_lane import HostLane
from axonn_ext.overlap.watch import Watch
from axonn_ext.ranks import tracing
from axonn_ext.spec import settings
from limits import HANG_SECONDS
from named_groups import group_named

X, DATA = 0.02, 0.01  # GB/s
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@contextmanager
def emulated(**links: float) -> Iterator[None]:
    """Links of the groups that this rank meets inside."""
    loaded = settings.load()
    extension.configure(dataclasses.replace(loaded, emulated_links=links))
    try:
        yield
    finally:
        extension.configure(loaded)


def run_op(kind: str, t: torch.Tensor, name: str, size: int, algorithm: str) -> torch.Tensor:
    if kind == "all_reduce":
        return torch.ops.axonn.all_reduce(t, "sum", name, size, algorithm)
    return getattr(torch.ops.axonn, kind)(t, 0, name, size, algorithm)


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def time_collectives(axis_name: str, size: int) -> dict[str, tuple[float, float, bool]]:
    """By kind: seconds, least seconds by the bytes that the trace counts, whether it is correct."""
    result = {}
    with emulated(x=X, data=DATA):
        grid = Grid(**{axis_name: size})
        axis = grid.axis(axis_name)
        speed = {"x": X, "data": DATA}[axis_name] * 1e9
        whole = torch.arange(30_000.0 * size)
        for kind in KINDS:
            t = whole.chunk(size)[axis.rank] if kind == "all_gather" else whole
            with tracing.trace_communication() as trace:
                got = run_op(kind, t, axis.name, size, "auto")
            (num_bytes,) = trace.bytes_by_axis().values()
            took = min(
                seconds_of(lambda kind=kind, t=t: run_op(kind, t, axis.name, size, "sequential"))
                for _ in range(3)
            )
            want = {
                "all_gather": whole, "all_reduce": whole * size,
                "reduce_scatter": (whole * size).chunk(size)[axis.rank],
            }[kind]  # fmt: skip
            result[kind] = took, num_bytes / speed, torch.equal(got, want)
    return result


@pytest.mark.parametrize("axis", ["x", "data"])
def test_a_collective_takes_its_bytes_over_the_bandwidth(pool: Any, axis: str):
    for times in pool(4).run(time_collectives, axis, 4):
        for kind, (took, least, right) in times.items():
            assert right, kind
            assert took >= least, kind


def axis_without_emulated_link() -> None:
    """y, which is not emulated, fuses; over a link like that of x it would take an hour."""
    with emulated(x=1e-6):
        y = Grid(x=1, y=2).axis("y")
        t = torch.ones(1000, 1000)
        for algorithm in ("fused", "auto"):
            run_op("all_reduce", t, y.name, 2, algorithm)


def test_other_axes_are_as_they_are(pool: Any):
    pool(2).run(axis_without_emulated_link)


def seconds_on_a_used_name() -> float:
    """Of 4 MB over x, after a group of the same name had a faster link."""
    took, t = 0.0, torch.ones(1_000_000)
    for attempt, speed in enumerate((100.0, X)):
        with emulated(x=speed), group_named("relinked", attempt, description="x") as name:
            took = seconds_of(lambda name=name: run_op("all_reduce", t, name, 2, "sequential"))
    return took


def test_a_group_of_a_used_name_has_its_own_link(pool: Any):
    for took in pool(2).run(seconds_on_a_used_name):
        assert took >= 4e6 / (X * 1e9)


def emulated_on_rank_1() -> str:
    with emulated(x=X) if dist.get_rank() == 1 else contextlib.nullcontext():
        axis = Grid(x=2).axis("x")
        with pytest.raises(RuntimeError) as error:
            torch.ops.axonn.all_gather_matmul(
                torch.ones(2, 2), torch.ones(2, 2), 0, axis.name, 2, "auto"
            )
    return str(error.value)


def test_ranks_that_differ_in_a_link_are_told(pool: Any):
    _, message = pool(2).run(emulated_on_rank_1)
    assert "rank 1 of group x (ranks 0, 1) cannot use 'fused', which rank 0 chose" in message


def refuse_fused() -> list[str]:
    messages = []
    with emulated(x=1.0):
        axis = Grid(x=2).axis("x")
        a, b = torch.ones(4, 4), torch.ones(4, 4)
        for call in (
            lambda: run_op("all_reduce", a, axis.name, 2, "fused"),
            lambda: torch.ops.axonn.all_gather_matmul(a, b, 0, axis.name, 2, "fused"),
        ):
            with pytest.raises(ValueError) as error:
                call()
            messages.append(str(error.value))
        # "auto" finds another way.
        torch.ops.axonn.all_gather_matmul(a, b, 0, axis.name, 2, "auto")
    return messages


def test_fused_is_refused_by_name(pool: Any):
    for messages in pool(2).run(refuse_fused):
        for op, message in zip(("all_reduce", "all_gather_matmul"), messages, strict=True):
            assert message.startswith(f"{op}: algorithm='fused'")
            assert "AXONN_EMULATED_LINKS" in message


def overlap_on_a_lane() -> tuple[float, float, float, bool]:
    """Seconds of two all-reduces of 50 ms each, which are waited for after 60 ms of sleep.

    Rank 1 starts its own only when rank 0 has: whoever started them must not wait for their ends.
    """
    with emulated(data=DATA):
        grid = Grid(data=2)
        axis = grid.axis("data")
        lanes = extension._C.Lanes()
        lane = HostLane(axis, lanes, Watch(axis, timeout_s=HANG_SECONDS, compare=False))
        first, second = (torch.full((125_000,), float(i)) for i in (1, 2))  # 500 kB sent each
        store = dist.distributed_c10d._get_default_store()
        if axis.rank == 1:
            store.wait(["links/started"])
        began = time.perf_counter()
        under_way = [lane.all_reduce(t, "a gradient") for t in (first, second)]
        store.set("links/started", "")
        time.sleep(0.06)
        for collective in under_way:
            collective.wait()
        took = time.perf_counter() - began
        right = bool((first == 2).all() and (second == 4).all())
        totals = lane.totals
        return took, totals.busy, totals.exposed, right


def test_a_lane_goes_on_while_its_links_are_busy(pool: Any):
    for took, busy, exposed, right in pool(2).run(overlap_on_a_lane):
        assert right
        # One after the other; the sleep during them is hidden.
        assert took >= 0.1 and busy >= 0.1
        assert exposed <= took - 0.06 + 1e-3


def test_the_setting():
    load = settings.load
    links = load({"AXONN_EMULATED_LINKS": "x=2.0, y=1,data=.25"}).emulated_links
    assert links == {"x": 2.0, "y": 1.0, "data": 0.25}
    assert load({}).emulated_links == {}


@pytest.mark.parametrize("text", ["x", "x=0", "x=fast", "x=nan", "w=1", "x=-1", "x=inf", "pipe=1"])
def test_a_bad_setting_is_named(text: str):
    with pytest.raises(ValueError, match="AXONN_EMULATED_LINKS must read like") as error:
        settings.load({"AXONN_EMULATED_LINKS": text})
    assert repr(text) in str(error.value)
    with pytest.raises(ValueError, match=r"each once.*'x=2'"):
        settings.load({"AXONN_EMULATED_LINKS": "x=1,x=2"})
