"""trace_communication: the collectives and bytes of our ops and torch's, fakes, nesting, text.

test_tracing_models.py traces whole models.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import matmul_facts
from axonn_ext import GridShape, nn, trace_communication
from axonn_ext.ops.specs import SPECS, matmuls
from axonn_ext.ranks import collectives
from axonn_ext.ranks.tracing import CommunicationRecord, CommunicationTrace, waited_seconds
from axonn_ext.verify import ranks
from grids import factorisations, grid_of

axonn, functional = torch.ops.axonn, torch.ops._c10d_functional
Issued = tuple[str, str, str, int]  # axis, collective, dtype, bytes per rank


@pytest.fixture
def fake_world() -> Iterator[int]:
    """Makes this process rank 1 of a fake world of four."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield 4
    dist.destroy_process_group()


def brief(trace: CommunicationTrace) -> list[Issued]:
    return [
        (r.axis, r.collective, str(r.dtype).removeprefix("torch."), r.bytes_per_rank)
        for r in trace.records
    ]


def ring_bytes(collective: str, full_elements: int, group_size: int, itemsize: int) -> int:
    """The bytes from the full tensor's size, as in papers, rounded up to whole elements."""
    passes = 2 if collective == "all_reduce" else 1
    sent = Fraction(passes * (group_size - 1) * full_elements, group_size)
    return math.ceil(sent) * itemsize


def test_sums_on_gpus_travel_in_their_own_dtype(fake_world):
    group = (dist.group.WORLD.group_name, fake_world)
    with FakeTensorMode(), trace_communication() as trace:
        for algorithm in ("sequential", "chunked", "auto"):
            a = torch.empty(8, 4, device="cuda", dtype=torch.bfloat16)
            y = axonn.matmul_reduce_scatter(a, a.t(), 0, *group, algorithm)
            assert y.device.type == "cuda" and y.shape == (2, 8)
            h = torch.empty(8, 4, device="cuda", dtype=torch.float16)
            assert axonn.all_reduce(h, "sum", *group, algorithm).dtype == torch.float16
    sums = [("reduce_scatter", torch.bfloat16, 96), ("all_reduce", torch.float16, 96)]
    assert [(r.collective, r.dtype, r.bytes_per_rank) for r in trace.records] == 3 * sums


# --- The ops -------------------------------------------------------------------------------------

M, K, N = 12, 8, 20


def op_cases(w: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...], int | None, list]]:
    """(op, shape of a, shape of b, dim, [(collective, elements of the full tensor)]). Collectives
    are those of forward, then those of backward, with da first."""
    cases = []
    for op, dim in ranks.OPS:
        what, facts = ranks.MATMULS[op], matmul_facts.MATMULS[op]
        elements = math.prod(matmul_facts.sizes_moved(op, M, K, N))
        issued = [(collective, elements) for collective in facts.issued]
        shapes = what.shapes(M, K, N, dim, w)
        cases.append((op, *shapes, None if what.option is None else dim, issued))
    return cases


def trace_ops(algorithm: str, dtype: torch.dtype) -> None:
    axis = grid_of(GridShape(x=dist.get_world_size())).axis("x")
    w, group = axis.size, (axis.name, axis.size, algorithm)
    wide = algorithm == "sequential" and dtype in (torch.bfloat16, torch.float16)
    for op, a_shape, b_shape, dim, issued in op_cases(w):
        a, b = (torch.ones(s, dtype=dtype, requires_grad=True) for s in (a_shape, b_shape))
        with trace_communication() as trace:
            dims = () if dim is None else (dim,)
            options = (True,) if op == "matmul_all_reduce" else ()  # deterministic
            getattr(axonn, op)(a, b, *dims, *group, *options).sum().backward()
        want = []
        for collective, elements in issued if w > 1 else []:
            crossing = torch.float32 if wide and collective != "all_gather" else dtype
            sent = ring_bytes(collective, elements, w, crossing.itemsize)
            want.append(("x", collective, str(crossing).removeprefix("torch."), sent))
        assert brief(trace) == want, (op, dim)
        assert all(record.group_size == w for record in trace.records)
        in_backward = re.findall(r"(\w+)\(", SPECS[op].backward)
        assert [r.op for r in trace.records] == [f"axonn::{n}" for n in (op, *in_backward)] * (
            w > 1
        )


def test_every_public_op_has_a_case():
    assert {op for op, *_ in op_cases(2)} == {spec.name for spec in matmuls.SPECS}


@pytest.mark.parametrize("algorithm", ["auto", "fused", "sequential"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_fused_ops(pool, world_size, dtype, algorithm):
    pool(world_size).run(trace_ops, algorithm, dtype)


def trace_collectives(algorithm: str) -> None:
    axis = grid_of(GridShape(y=dist.get_world_size())).axis("y")
    w = axis.size
    for columns in (0, 1, 5):
        x = torch.ones(2 * w, columns, requires_grad=True)
        n = x.numel()
        with trace_communication() as trace:
            collectives.all_gather(x, axis, dim=1, algorithm=algorithm).sum().backward()
            collectives.reduce_scatter(x, axis, algorithm=algorithm).sum().backward()
            collectives.all_reduce(x[:-1], axis, algorithm=algorithm).sum().backward()
            collectives.reduce_from(x, axis, algorithm=algorithm).sum().backward()
            collectives.all_reduce(torch.ones(3).long(), axis, reduce_op="max", algorithm=algorithm)
        issued = [("all_gather", n * w, 4), ("reduce_scatter", n * w, 4)]
        issued += [("reduce_scatter", n, 4), ("all_gather", n, 4)]
        issued += [("all_reduce", n - columns, 4)] * 2  # ragged: rounded up
        issued += [("all_reduce", n, 4), ("all_reduce", 3, 8)]
        got = [(axis, collective, sent) for axis, collective, _, sent in brief(trace)]
        want = [("y", c, ring_bytes(c, elements, w, size)) for c, elements, size in issued]
        assert got == (want if w > 1 else [])


@pytest.mark.parametrize("algorithm", ["fused", "sequential"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_collectives(pool, world_size, algorithm):
    pool(world_size).run(trace_collectives, algorithm)


def test_sizes_that_the_group_does_not_divide_are_rounded_up_to_elements(fake_world):
    x = torch.ones(5, dtype=torch.float64)
    with trace_communication() as trace:
        axonn.all_reduce(x.to("meta"), "sum", "7 ranks", 7, "auto")
        axonn.all_reduce(x[:1].to("meta"), "sum", "4 ranks", 4, "auto")
    # 2 * 6/7 * 5 = 8.57 and 2 * 3/4 * 1 = 1.5 elements of 8 bytes. The groups need not exist.
    assert brief(trace) == [
        ("7 ranks", "all_reduce", "float64", 72),
        ("4 ranks", "all_reduce", "float64", 16),
    ]


# --- Linear --------------------------------------------------------------------------------------

ROWS, IN, OUT = 24, 16, 32
LAYOUTS = [
    {"layout": "replicated"},
    {},
    {"save_gathered": True},
    {"gather_dim": 1},
    {"scatter_dim": 1},
    {"gather_dim": 1, "scatter_dim": 1},
]


def linear_volume(layer: nn.Linear, shape: GridShape, input_grad: bool) -> list[Issued]:
    """The collectives by the formulas of docs/architecture.md, sorted."""
    r, s = ("x", "y") if layer.role == "expand" else ("y", "x")
    sizes, m = shape.as_dict(), ROWS // (shape.data * shape.z)
    x, y = m * IN // sizes[s], m * OUT // sizes[r]
    w = IN * OUT // (shape.x * shape.y)
    issued = [("z", "all_gather", w), ("z", "reduce_scatter", w)]
    if layer.reshard_after_forward and input_grad:
        issued += [("z", "all_gather", w)]
    if layer.layout == "replicated":
        issued += [(s, "all_reduce", y)] + [(r, "all_reduce", x)] * input_grad
    else:
        issued += [(r, "all_gather", x), (s, "reduce_scatter", y), (s, "all_gather", y)]
        issued += [(r, "reduce_scatter", x)] * input_grad
        issued += [(r, "all_gather", x)] * (not layer.save_gathered)
    return sorted(
        (axis, collective, "float32", ring_bytes(collective, elements, sizes[axis], 4))
        for axis, collective, elements in issued
        if sizes[axis] > 1
    )


def linears(shape: GridShape, algorithm: str) -> Iterator[tuple[nn.Linear, torch.Tensor]]:
    grid = grid_of(shape)
    for role in ("expand", "contract"):
        for options in LAYOUTS:
            for reshard in (True, False):
                layer = nn.Linear(
                    IN, OUT, grid=grid, role=role, algorithm=algorithm,
                    reshard_after_forward=reshard, **options,
                )  # fmt: skip
                yield layer, grid.shard(torch.ones(ROWS, IN), layer.input_dims)


def trace_linear(world_size: int) -> None:
    for shape in factorisations(world_size):
        for layer, x in linears(shape, "auto"):
            for input_grad in (True, False):
                with trace_communication() as trace:
                    layer(x.clone().requires_grad_(input_grad)).sum().backward()
                assert sorted(brief(trace)) == linear_volume(layer, shape, input_grad), (
                    f"{shape} {layer} {input_grad=}"
                )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_linear(pool, world_size):
    pool(world_size).run(trace_linear, world_size)


KINDS = {
    "c10d::_allgather_base_": "all_gather",
    "axonn::gloo_reduce_scatter": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
}


def is_part_of_another(event: torch.autograd.profiler_util.FunctionEvent) -> bool:
    """Whether this is the all-reduce with which gloo implements a reduce-scatter."""
    return event.cpu_parent is not None and event.cpu_parent.name in KINDS


def watch_linear(shape: GridShape) -> None:
    """Compares the record with the calls of c10d and gloo in the profiler."""
    for layer, x in linears(shape, "sequential"):
        cpu = torch.profiler.ProfilerActivity.CPU
        with (
            trace_communication() as trace,
            torch.profiler.profile(activities=[cpu], record_shapes=True) as profile,
        ):
            layer(x.requires_grad_()).sum().backward()
        events = sorted(profile.events(), key=lambda event: event.time_range.start)
        issued = [e for e in events if e.name in KINDS and not is_part_of_another(e)]
        kinds = [KINDS[event.name] for event in issued]
        passed_in = [event.input_shapes[0][0] for event in events if event.name.startswith("gloo:")]
        assert kinds == [record.collective for record in trace.records], (shape, layer)
        seen = [
            ring_bytes(kind, n * (record.group_size if kind == "all_gather" else 1),
                       record.group_size, 4)
            for kind, n, record in zip(kinds, passed_in, trace.records, strict=True)
        ]  # fmt: skip
        assert seen == [record.bytes_per_rank for record in trace.records], (shape, layer)


@pytest.mark.parametrize("shape", [GridShape(x=2, y=2), GridShape(x=2, z=2), GridShape(y=2, z=2)])
def test_record_is_what_the_kernels_hand_to_c10d(pool, shape):
    pool(4).run(watch_linear, shape)


# --- Torch's own collectives ---------------------------------------------------------------------


def test_torch_distributed(fake_world):
    x, parts = torch.ones(8), [torch.empty(8) for _ in range(4)]
    pair = dist.new_group([1, 2], group_desc="a pair")
    with trace_communication() as trace:
        dist.all_reduce(x)
        dist.all_reduce(x.bfloat16(), group=pair)
        dist.all_gather(parts, x)
        dist.reduce_scatter(x, parts)
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.gather(x, dst=0)
        dist.all_to_all_single(torch.empty(8), x)
        dist.send(x, 0)
        dist.recv(x, 0)
        dist.barrier()
        name = pair.group_name
        functional.wait_tensor(functional.all_gather_into_tensor(x, 2, name))
        functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", 2, name))
        for y in functional.all_reduce_coalesced([x, x.half()], "sum", "0"):
            functional.wait_tensor(y)
        dist.all_reduce(x, group=dist.new_group([1]))
    assert brief(trace) == [
        ("default_pg", "all_reduce", "float32", 48),
        ("a pair", "all_reduce", "bfloat16", 16),
        ("default_pg", "all_gather", "float32", 96),
        ("default_pg", "reduce_scatter", "float32", 96),
        ("default_pg", "broadcast", "float32", 24),
        ("default_pg", "reduce", "float32", 24),
        ("default_pg", "gather", "float32", 24),
        ("default_pg", "all_to_all", "float32", 24),
        ("default_pg", "send", "float32", 32),
        ("default_pg", "recv", "float32", 0),
        ("default_pg", "barrier", "uint8", 0),
        ("a pair", "all_gather", "float32", 32),
        ("a pair", "reduce_scatter", "float32", 16),
        ("default_pg", "all_reduce", "float32", 48),
        ("default_pg", "all_reduce", "float16", 24),
    ]
    assert [record.op for record in trace.records[:3]] == [
        "c10d::allreduce_", "c10d::allreduce_", "c10d::allgather_"
    ]  # fmt: skip


def test_a_collective_that_cannot_be_counted_is_refused(fake_world):
    x = torch.ones(8, device="meta")
    with pytest.raises(NotImplementedError, match="symm_mem::one_shot_all_reduce sends"):
        with trace_communication():
            torch.ops.symm_mem.one_shot_all_reduce(x, "sum", "0")


# --- Nesting, exceptions, compilation, text ------------------------------------------------------


def test_nested_traces_see_the_same_and_leaving_restores(fake_world):
    x = torch.ones(8)
    with trace_communication() as outer:
        dist.all_reduce(x)
        with pytest.raises(ZeroDivisionError), trace_communication() as failed:
            dist.all_reduce(x)
            raise ZeroDivisionError
        with trace_communication() as inner:
            dist.all_reduce(x)
    dist.all_reduce(x)
    assert [len(t.records) for t in (outer, failed, inner)] == [3, 1, 1]
    assert inner.records == failed.records == outer.records[:1]
    assert _get_current_dispatch_mode_stack() == []


class Forwarding(TorchDispatchMode):
    """A mode that passes everything on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_what_fails_is_not_recorded_and_other_modes_do_not_hide(fake_world):
    with trace_communication() as trace, Forwarding():
        with pytest.raises(RuntimeError):
            axonn.all_reduce(torch.ones(2), "sum", "no such group", 4, "sequential")
        dist.all_reduce(torch.ones(8))
    assert brief(trace) == [("default_pg", "all_reduce", "float32", 48)]


def trace_compiled() -> None:
    torch.compiler.reset()
    grid = grid_of(GridShape(x=2))
    layer = nn.Linear(16, 32, grid=grid, role="expand")
    axis = grid.axis("x")

    def function(x: torch.Tensor) -> torch.Tensor:
        return collectives.all_reduce(layer(x), axis).square().sum()

    def records(f) -> list[CommunicationRecord]:
        with trace_communication() as trace:
            f(torch.ones(8, 16, requires_grad=True)).backward()
        return trace.records

    compiled = torch.compile(function, fullgraph=True)
    eager = records(function)
    assert len(eager) == 5
    assert records(compiled) == eager, "compiled inside the trace"
    assert records(compiled) == eager, "compiled before"


def test_compiled_functions_are_recorded(pool):
    pool(2).run(trace_compiled)


def test_summary():
    def record(axis: str, collective: str, sent: int) -> CommunicationRecord:
        return CommunicationRecord(axis, collective, sent, "axonn::op", torch.float32, 2)

    trace = CommunicationTrace(
        [record("z", "all_gather", 1000), record("x", "all_gather", 24),
         record("z", "reduce_scatter", 1), record("z", "all_gather", 234)]
    )  # fmt: skip
    assert trace.total_bytes == 1259
    assert trace.bytes_by_axis() == {"z": 1235, "x": 24}
    assert trace.summary().splitlines() == [
        "axis   collective      dtype    calls  bytes per rank",
        "z      all_gather      float32      2           1,234",
        "z      reduce_scatter  float32      1               1",
        "x      all_gather      float32      1              24",
        "total                               4           1,259",
    ]
    assert CommunicationTrace().summary().splitlines()[-1].split() == ["total", "0", "0"]


# --- Waiting --------------------------------------------------------------------------------------


def wait_of_a_fast_rank(algorithm: str, delay: float) -> tuple[float, float]:
    """The waiting time that a rank counts for one call over x, to which rank 1 comes late."""
    axis = grid_of(GridShape(2)).axis("x")
    shard = torch.ones(4, 4)
    torch.ops.axonn.all_gather(shard, 0, axis.name, axis.size, algorithm)
    dist.barrier()
    before = waited_seconds().get(axis.name, 0.0)
    store = dist.distributed_c10d._get_default_store()
    if axis.rank == 0:
        store.set(f"calls/{algorithm}", "")
    else:
        store.wait([f"calls/{algorithm}"])
        time.sleep(delay)
    torch.ops.axonn.all_gather(shard, 0, axis.name, axis.size, algorithm)
    return waited_seconds()[axis.name] - before


@pytest.mark.parametrize("algorithm", ["fused", "sequential"])
def test_a_rank_counts_how_long_it_waits_for_its_peer(pool, algorithm):
    early, late = pool(2).run(wait_of_a_fast_rank, algorithm, 0.5)
    assert late < early / 2
    assert early > 0.25, "a busy machine may start it late"
