"""The Triton kernels on a GPU: the interpreter's checks, and what the interpreter cannot tell.

Ranks of the fused kernels are streams of one process ("virtual ranks"): their kernels run side by
side, each on its share of the SMs. Kernels are compiled and loaded, and memory is allocated, before
they have to wait for each other: either may wait for all that runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from axonn_ext.triton.tile_configs import TileConfig, legal_configs
from grids import bound, relative_error

pytestmark = pytest.mark.gpu

SECOND_NS = 10**9
DTYPES = ["bf16", "fp16", "fp32"]


def load(name: str) -> ModuleType:
    """A module that imports triton, which is not imported where no test of this file runs."""
    return importlib.import_module(name)


@contextmanager
def tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


# --- matmul --------------------------------------------------------------------------------------


def failures_of(cases: list[dict[str, Any]], configs: list[TileConfig | None]) -> list[str]:
    module = load("triton_cases")
    return module.check_matmul([module.MatmulCase(**case) for case in cases], configs, "cuda")


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT", "SS"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout_and_dtype(dtype, layout):
    sizes = [(512, 768, 256), (129, 257, 65), (1, 512, 512), (33, 1, 7)]
    cases = [{"m": m, "n": n, "k": k, "dtype": dtype, "layout": layout} for m, n, k in sizes]
    split = TileConfig(32, 32, 16, 4, 3, split_k=4)
    assert failures_of(cases, [None]) == []
    assert failures_of(cases[:1], [split]) == []


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_epilogue(dtype, activation):
    base = {"dtype": dtype, "bias": True, "activation": activation}
    cases = [{**base, "m": m, "n": n, "k": k} for m, n, k in ((256, 512, 512), (37, 130, 64))]
    split = TileConfig(32, 32, 16, 4, 3, split_k=2)
    assert failures_of(cases, [None, split]) == []
    empty = [{**base, "m": m, "n": n, "k": k} for m, n, k in ((0, 4, 4), (4, 0, 4), (4, 4, 0))]
    assert failures_of(empty, [None]) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_legal_config(dtype):
    cases = load("triton_cases")
    launch = load("axonn_ext.triton.launch")
    matmul = load("axonn_ext.triton.matmul")
    case = cases.MatmulCase(304, 272, 528, dtype=dtype)
    a, b = (
        torch.empty(*shape, dtype=cases.DTYPES[dtype], device="cuda")
        for shape in ((case.m, case.k), (case.k, case.n))
    )
    with tf32():
        problem = matmul.problem_of(a, b, bias=None, activation=None)
        legal = legal_configs(problem, launch.limits_of(a.device))
        configs = [config for config in legal if config.split_k == 1]
        assert len(configs) > 10
        assert cases.check_matmul([case], configs, "cuda") == []


def test_offsets_have_64_bits():
    matmul = load("axonn_ext.triton.matmul").matmul
    storage = torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    a = storage.as_strided((2, 64), (2**31, 1))
    a.copy_(torch.arange(128.0).view(2, 64))
    eye = torch.eye(64, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(matmul(a, eye), a)


def test_a_tuner_measures_and_a_graph_does_not():
    autotune, matmul = load("axonn_ext.triton.autotune"), load("axonn_ext.triton.matmul").matmul
    a, b = (torch.randn(1024, 1024, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    want = matmul(a, b)
    captured = autotune.Tuner(measure=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = matmul(a, b, tuner=captured)
    assert [choice.source for choice in captured.choices()] == ["default"]
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)
    tuner = autotune.Tuner(measure=True)
    matmul(a, b, tuner=tuner)
    [choice] = tuner.choices()
    assert choice.source == "measured" and len(choice.median_us) > 5
    assert choice.median_us[choice.config.name] == min(choice.median_us.values())
    assert all(0.5 < us < 1e5 for us in choice.median_us.values())


# --- With collectives ----------------------------------------------------------------------------


def case_of(*sizes: int, **fields: Any) -> Any:
    return load("triton_fused_cases").FusedCase(*sizes, device="cuda", config=None, **fields)


class VirtualRanks:
    """Streams, signals and buffers of the ranks of a case."""

    def __init__(self, case: Any, *buffer_shape: int, timeout_ns: int = 10 * SECOND_NS) -> None:
        self.cases = load("triton_fused_cases")
        ranks = self.cases.Ranks(case, *buffer_shape)
        self.buffers, self.pointers = ranks.buffers, ranks.pointers(ranks.buffers)
        self.signals = [ranks.signals(rank, timeout_ns) for rank in range(case.world_size)]
        self.streams = [torch.cuda.Stream() for _ in range(case.world_size)]
        self.side_streams = [torch.cuda.Stream() for _ in range(case.world_size)]
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.share = sms // (2 * case.world_size)  # what waits leaves room for what is waited for

    def settle(self, phased: bool) -> None:
        """Between two kernels of a call that warms up: the second then finds its flags raised."""
        if phased:
            torch.cuda.synchronize()


def run_all_gather(case: Any) -> list[str]:
    """What is wrong with any call on any rank. The first call warms up."""
    kernels = load("axonn_ext.triton.all_gather_matmul")
    world, failures = case.world_size, []
    ranks = VirtualRanks(case, 2, world * case.rows, case.k)
    for call in range(case.calls):
        shards = [ranks.cases.shard_of(case, rank, call) for rank in range(world)]
        weights = [ranks.cases.weight_of(case, rank, call) for rank in range(world)]
        outputs: list[torch.Tensor] = []
        torch.cuda.synchronize()
        for rank in range(world):
            with torch.cuda.stream(ranks.streams[rank]):
                ranks.signals[rank].advance()
            ranks.side_streams[rank].wait_stream(ranks.streams[rank])
            with torch.cuda.stream(ranks.side_streams[rank]):
                kernels.push_shard(
                    shards[rank], ranks.buffers[rank], ranks.pointers, ranks.signals[rank],
                    chunk_tile=case.chunk_tile, num_programs=2,
                )  # fmt: skip
            if call > 0:  # its peers' rows are not even on their way
                outputs.append(multiply_gathered(case, ranks, rank, weights[rank]))
        ranks.settle(call == 0)
        for rank in range(len(outputs), world):
            outputs.append(multiply_gathered(case, ranks, rank, weights[rank]))
        torch.cuda.synchronize()
        rows = torch.cat(shards).double()
        for rank, out in enumerate(outputs):
            ranks.signals[rank].raise_failure("all_gather_matmul")
            want = rows @ weights[rank].double()
            name = f"{case} rank {rank} call {call}"
            failures += ranks.cases.check_error(name, out, want, case.k, 1)
    return failures


def multiply_gathered(
    case: Any, ranks: VirtualRanks, rank: int, weight: torch.Tensor
) -> torch.Tensor:
    kernels = load("axonn_ext.triton.all_gather_matmul")
    with torch.cuda.stream(ranks.streams[rank]):
        return kernels.all_gather_matmul(
            ranks.buffers[rank], weight, ranks.signals[rank], chunk_tile=case.chunk_tile,
            max_programs=ranks.share,
        )  # fmt: skip


FUSED = [
    ((2, 512, 768, 512), {"chunk_tile": 128}),
    ((4, 256, 512, 256), {"chunk_tile": 128, "layout": "NT"}),
    ((2, 37, 33, 20), {"chunk_tile": 32}),
    ((4, 1, 5, 3), {"chunk_tile": 32, "chunks": 3}),
    ((2, 256, 256, 256), {"chunk_tile": 128, "first_epoch": 2**31 - 2}),
]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("sizes", "fields"), FUSED)
def test_all_gather_matmul(sizes, fields, dtype):
    assert run_all_gather(case_of(*sizes, dtype=dtype, calls=6, **fields)) == []


def run_reduce_scatter(case: Any) -> tuple[list[str], list[torch.Tensor]]:
    """What is wrong, and every result. The first call warms up."""
    kernels = load("axonn_ext.triton.matmul_reduce_scatter")
    world, failures, results = case.world_size, [], []
    ranks = VirtualRanks(case, 2, world, case.rows, case.n)

    def add_up(rank: int) -> torch.Tensor:
        with torch.cuda.stream(ranks.streams[rank]):
            return kernels.reduce_slots(
                ranks.buffers[rank], ranks.signals[rank], chunk_tile=case.chunk_tile,
                max_programs=ranks.share,
            )  # fmt: skip

    for call in range(case.calls):
        addends = [ranks.cases.addend_of(case, rank, call) for rank in range(world)]
        outputs: list[torch.Tensor] = []
        torch.cuda.synchronize()
        for rank in range(world):
            with torch.cuda.stream(ranks.streams[rank]):
                ranks.signals[rank].advance()
                kernels.multiply_and_send(
                    *addends[rank], ranks.buffers[rank], ranks.pointers, ranks.signals[rank],
                    chunk_tile=case.chunk_tile,
                )  # fmt: skip
            if call > 0:
                outputs.append(add_up(rank))
        ranks.settle(call == 0)
        outputs += [add_up(rank) for rank in range(len(outputs), world)]
        torch.cuda.synchronize()
        whole = sum(a.double() @ b.double() for a, b in addends)
        for rank, out in enumerate(outputs):
            ranks.signals[rank].raise_failure("reduce_slots")
            want = whole[rank * case.rows : (rank + 1) * case.rows]
            name = f"{case} rank {rank} call {call}"
            failures += ranks.cases.check_error(name, out, want, case.k * world, 1 + world)
        results += [out.cpu() for out in outputs]
    return failures, results


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("sizes", "fields"), FUSED)
def test_matmul_reduce_scatter_and_again_with_the_same_bits(sizes, fields, dtype):
    case = case_of(*sizes, dtype=dtype, calls=6, **fields)
    failures, results = run_reduce_scatter(case)
    assert failures == []
    for _ in range(3):
        _, again = run_reduce_scatter(case)
        assert all(torch.equal(x, y) for x, y in zip(results, again, strict=True))


def test_a_chunk_that_does_not_come_is_named():
    kernels = load("axonn_ext.triton.all_gather_matmul")
    case = case_of(2, 256, 256, 256, chunk_tile=128)
    ranks = VirtualRanks(case, 2, 512, 256, timeout_ns=SECOND_NS // 20)
    ranks.signals[0].advance()
    kernels.push_shard(
        ranks.cases.shard_of(case, 0, 0), ranks.buffers[0], ranks.pointers, ranks.signals[0],
        chunk_tile=case.chunk_tile,
    )  # fmt: skip
    weight = ranks.cases.weight_of(case, 0, 0)
    kernels.all_gather_matmul(
        ranks.buffers[0], weight, ranks.signals[0], chunk_tile=case.chunk_tile
    )
    with pytest.raises(RuntimeError, match=r"rank 0 gave up waiting for chunk \d of rank 1"):
        ranks.signals[0].raise_failure("all_gather_matmul")


def test_a_captured_call_replays():
    """The epoch lies on the device, so the flags of each replay are its own."""
    kernels = load("axonn_ext.triton.matmul_reduce_scatter")
    case = case_of(1, 256, 256, 128, chunk_tile=128)
    ranks = VirtualRanks(case, 2, 1, 256, 256)
    a, b = ranks.cases.addend_of(case, 0, 0)

    def call() -> torch.Tensor:
        ranks.signals[0].advance()
        kernels.multiply_and_send(
            a, b, ranks.buffers[0], ranks.pointers, ranks.signals[0], chunk_tile=128
        )
        return kernels.reduce_slots(ranks.buffers[0], ranks.signals[0], chunk_tile=128)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(5):
        a.normal_()
        graph.replay()
        ranks.signals[0].raise_failure("reduce_slots")
        assert relative_error(out, a.double() @ b.double()) <= bound(torch.float32, 128)
    assert int(ranks.signals[0].epoch) == 6
