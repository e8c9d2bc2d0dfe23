"""The measurements, which all ranks make at the same time.

Times are from the first rank's start to the slowest rank's end. If ranks share cores, the result
includes the effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from axonn_ext import ops  # noqa: F401  (registers torch.ops.axonn)
from axonn_ext.calibrate.fit import Point
from axonn_ext.calibrate.measure import Ranks, Timing, measure, ranks_of, synchronize_with
from axonn_ext.calibrate.messages import Shift
from axonn_ext.calibrate.plan import SEND, Plan, Product
from axonn_ext.calibrate.this_machine import DTYPES
from axonn_ext.kernels import host
from axonn_ext.ranks.grid import AxisGroup, Grid

Json = dict[str, Any]
Call = Callable[[], object]

_MIN_BATCH_SECONDS = 0.02
# Each group sends a message so small that only latency matters, and fractions of a message whose
# bytes take _LARGEST_SECONDS, which is long compared with the noise of a busy machine. The
# bandwidth is first estimated with _PROBE_BYTES.
_SMALL_BYTES, _PROBE_BYTES = 256, 256 << 10
_LARGEST_SECONDS = {"cpu": 0.12, "cuda": 0.005}
_LARGEST_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
_PARTS, _LEAST_LARGEST = (1, 2, 4), 16
_ELEMENTWISE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # the bytes of each tensor
_ATTENTION = {"cpu": (2, 4, 128, 32), "cuda": (4, 16, 2048, 128)}  # batch, heads, sequence, D
_TINY = 16  # the edge of a matrix so small that only the call takes time


def measure_machine(plan: Plan) -> Json:
    """Measures everything that `axonn-ext bench links` needs.

    All ranks must call this, and get the same result.
    """
    ranks = ranks_of(plan.device)
    with torch.no_grad():
        result: Json = {
            "memory_bytes": _memory_bytes(plan),
            "links": _measure_links(plan, ranks),
            "products": [row for dtype in plan.dtypes for row in _products(plan, ranks, dtype)],
        }
        result |= _elementwise(plan, ranks)
    result["attention"] = {dtype: _attention(plan, ranks, dtype) for dtype in plan.dtypes}
    return result


def _time(plan: Plan, ranks: Ranks, calls: Mapping[str, Call]) -> dict[str, Timing[object]]:
    for call in calls.values():
        call()
    return measure(
        calls, ranks, rounds=plan.rounds, min_batch_seconds=_MIN_BATCH_SECONDS,
        synchronize=synchronize_with(plan.device),
    )  # fmt: skip


def _seconds(timing: Timing[object]) -> tuple[float, float]:
    """Returns the median and the interquartile range in seconds."""
    return timing.median_us * 1e-6, timing.iqr_us * 1e-6


# --- Links ---------------------------------------------------------------------------------------


def _measure_links(plan: Plan, ranks: Ranks) -> list[Json]:
    grids: dict[str, Grid] = {}
    rows = []
    for shape in plan.groups:
        name = str(shape.grid)
        if name not in grids:
            grids[name] = Grid(**shape.grid.as_dict())
        axis = grids[name].axis(shape.axis)
        for kind in shape.kinds:
            points = _points(plan, ranks, axis, kind)
            rows.append({
                "axis": shape.axis if plan.by_axis else None, "inner": shape.inner,
                "size": shape.size, "kind": kind, "points": points,
            })  # fmt: skip
    return rows


def _points(plan: Plan, ranks: Ranks, axis: AxisGroup, kind: str) -> list[Point]:
    """Times one kind of collective, or messages of a pipeline, with several numbers of bytes."""
    if kind != SEND:
        return _points_of(plan, ranks, partial(_collective, plan, axis, kind))
    shift = Shift(axis, torch.ones(0, device=plan.device).device)
    points = _points_of(plan, ranks, partial(_message, plan, shift))
    shift.close()
    return points


def _points_of(plan: Plan, ranks: Ranks, make: Callable[[int], tuple[int, Call]]) -> list[Point]:
    """Times calls of several sizes; the bytes of the largest take _LARGEST_SECONDS.

    make(bytes): returns the exact bytes that each rank sends, and a call that sends them.
    """
    messages = [make(n) for n in (_SMALL_BYTES, _PROBE_BYTES)]
    probes = measure(
        {str(sent): call for sent, call in messages}, ranks, rounds=2, min_batch_seconds=0.0,
        synchronize=synchronize_with(plan.device),
    )  # fmt: skip
    latency, probe = (timing.min_us * 1e-6 for timing in probes.values())
    growth = _LARGEST_SECONDS[plan.device] / max(probe - latency, 0.1 * probe)
    largest = int(min(_LARGEST_BYTES[plan.device], _PROBE_BYTES * growth))
    largest = max(largest, _LEAST_LARGEST * _SMALL_BYTES)
    wanted = [_SMALL_BYTES, *(largest // part for part in _PARTS)]
    messages = [make(num_bytes) for num_bytes in wanted]
    timings = _time(plan, ranks, {str(sent): call for sent, call in messages})
    return [Point(int(sent), *_seconds(timing)) for sent, timing in timings.items()]


def _collective(plan: Plan, axis: AxisGroup, kind: str, num_bytes: int) -> tuple[int, Call]:
    """Returns the exact bytes and the call of a collective that sends about num_bytes per rank."""
    dtype = DTYPES[plan.dtypes[0]]
    if kind != "all_gather" and plan.device == "cpu":
        dtype = torch.float32  # in which c10d sends low precision for sums
    g, width = axis.size, dtype.itemsize
    passes = 2 if kind == "all_reduce" else 1
    shard = max(1, num_bytes // (passes * (g - 1) * width))
    whole = torch.ones(shard if kind == "all_gather" else shard * g, 1,
                       dtype=dtype, device=plan.device)  # fmt: skip
    issue: dict[str, Callable[[], Tensor]] = {
        "all_gather": lambda: torch.ops.axonn.all_gather(whole, 0, axis.name, g, "auto"),
        "reduce_scatter": lambda: torch.ops.axonn.reduce_scatter(whole, 0, axis.name, g, "auto"),
        "all_reduce": lambda: torch.ops.axonn.all_reduce(whole, "sum", axis.name, g, "auto"),
    }
    return passes * (g - 1) * shard * width, issue[kind]


def _message(plan: Plan, shift: Shift, num_bytes: int) -> tuple[int, Call]:
    """Returns the exact bytes and the call of a message of about num_bytes from every rank."""
    tensor = torch.ones(num_bytes // 4, device=plan.device)  # fp32
    return tensor.nbytes, shift.call(tensor)


# --- Computation ---------------------------------------------------------------------------------


def _products(plan: Plan, ranks: Ranks, dtype: str) -> list[Json]:
    calls = {p: _product(plan, p, DTYPES[dtype]) for p in plan.products}
    timings = _time(plan, ranks, {str(p): call for p, call in calls.items()})
    rows = []
    for product in calls:
        seconds, spread = _seconds(timings[str(product)])
        rows.append({"dtype": dtype, **product._asdict(), "seconds": seconds, "spread_s": spread})
    return rows


def _product(plan: Plan, product: Product, dtype: torch.dtype) -> Call:
    m, n, k, layout = product
    a = torch.ones((k, m) if layout[0] == "T" else (m, k), dtype=dtype, device=plan.device)
    b = torch.ones((n, k) if layout[1] == "T" else (k, n), dtype=dtype, device=plan.device)
    a, b = a.t() if layout[0] == "T" else a, b.t() if layout[1] == "T" else b
    return lambda: torch.mm(a, b)


def _elementwise(plan: Plan, ranks: Ranks) -> Json:
    """Measures the memory bandwidth of c = a + b, and the time of a call with almost no work."""
    count = _ELEMENTWISE_BYTES[plan.device] // 4
    a, b, c = (torch.ones(count, device=plan.device) for _ in range(3))
    small = torch.ones(_TINY, _TINY, device=plan.device)
    timings = _time(plan, ranks, {
        "add": lambda: torch.add(a, b, out=c), "tiny": lambda: torch.mm(small, small),
    })  # fmt: skip
    add, _ = _seconds(timings["add"])
    tiny, _ = _seconds(timings["tiny"])
    return {"memory_bytes_per_s": 3 * 4 * count / add, "launch_s": tiny}


def _attention(plan: Plan, ranks: Ranks, dtype: str) -> float:
    """Returns the flop/s of causal attention in forward and backward.

    Forward has 2 products and backward 5, each over half of the scores.
    """
    batch, heads, sequence, features = _ATTENTION[plan.device]
    q, k, v = (
        torch.ones(batch, heads, sequence, features, dtype=DTYPES[dtype], device=plan.device,
                   requires_grad=True)
        for _ in range(3)
    )  # fmt: skip
    grad = torch.ones_like(q)

    def call() -> object:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), grad)

    seconds, _ = _seconds(_time(plan, ranks, {"attention": call})["attention"])
    forward = 2 * batch * heads * sequence * sequence * features
    return forward * 7 / 2 / seconds


def _memory_bytes(plan: Plan) -> int:
    """Returns the memory of one rank."""
    if plan.device == "cuda":
        sharing = -(-plan.num_ranks // torch.cuda.device_count())
        return int(torch.cuda.get_device_properties().total_memory) // sharing
    return host.memory_bytes() // plan.num_ranks
