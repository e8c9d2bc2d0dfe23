"""The fused GEMMs on one GPU: plain, and between virtual ranks that share it.

Virtual ranks wait, signal and sum like real ranks; only the links are emulated.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext.kernels import extension
from axonn_ext.verify import virtual
from axonn_ext.verify.accuracy import check
from axonn_ext.verify.linears import linear_failures
from axonn_ext.verify.ranks import OPS, op_failures
from axonn_ext.verify.virtual import (
    DTYPES,
    LAYOUTS,
    SHAPES,
    WORKSPACE,
    draw,
    gathered,
    stored,
)
from grids import every_grid
from limits import HANG_SECONDS

pytestmark = pytest.mark.gpu


def name_of(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@pytest.fixture(scope="module")
def cuda() -> object:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the fused kernels are for sm_90")
    assert extension.cuda is not None and extension.cuda_sm90 is not None, "built without CUTLASS"
    return extension.cuda


# --- The plain product ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("wait_chunks", [0, 1, 4])
def test_gemm(cuda, dtype, transposed, shape, wait_chunks):
    virtual.check_gemm(cuda, shape, dtype, transposed=transposed, wait_chunks=wait_chunks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_residual(cuda, dtype):
    virtual.check_bias_and_residual(cuda, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", LAYOUTS)
@pytest.mark.parametrize("shape", [(264, 200, 136), (16, 64, 64)], ids=name_of)
def test_every_tile_that_is_asked_for(cuda, dtype, transposed, shape):
    """All tiles go through K in the same order, so their bits are equal."""
    m, n, k = shape
    a = stored(draw(m, k, seed=1, dtype=dtype), transposed[0])
    b = stored(draw(k, n, seed=2, dtype=dtype), transposed[1])
    want = cuda.gemm(a, b)
    check(want, a.double() @ b.double(), a @ b)
    modelled = cuda.gemm_tiles(a, b)
    names = [tile for tile, _ in modelled]
    assert names == [f"{m}x{n}" for (m, n, _), _, _ in cuda.gemm_candidates_sm90()]
    assert all(us > 0 for _, us in modelled)
    for tile in names:
        assert torch.equal(cuda.gemm(a, b, tile=tile), want), tile
        (product,) = torch.ops.axonn._mm_fused_sm90(a, b, None, tile)
        assert torch.equal(product, want), tile


def test_a_tile_that_there_is_not(cuda):
    a = draw(64, 64, seed=1, dtype=torch.bfloat16)
    known = ", ".join(tile for tile, _ in cuda.gemm_tiles(a, a))
    for tile in ("96x96", "all"):
        with pytest.raises(ValueError, match=f"tile must be one of {known}, got '{tile}'"):
            cuda.gemm(a, a, tile=tile)


def test_kernels_of_triton_choose_their_tiles():
    if extension.cuda is None or extension.cuda.gemm_source(0) != "triton":
        pytest.skip("the kernels here are not Triton's")
    a = draw(64, 64, seed=1, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="choose their tiles by themselves"):
        extension.cuda.gemm_tiles(a, a)


def test_what_no_kernel_computes_is_refused(cuda):
    a = draw(64, 64, seed=1, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="rows must be a multiple of 16 bytes"):
        cuda.gemm(draw(64, 33, seed=1, dtype=torch.bfloat16), a[:33])
    with pytest.raises(NotImplementedError, match="bfloat16 and float16"):
        cuda.gemm(a.float(), a.float())
    with pytest.raises(NotImplementedError, match="both be transposed"):
        cuda.gemm(stored(a, True), stored(a, True))


# --- Virtual ranks -------------------------------------------------------------------------------


@pytest.fixture
def ranks(cuda) -> Callable[[int], object]:
    return lambda size: virtual.virtual_ranks(cuda, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arriving", virtual.ARRIVING)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_gather_matmul(cuda, dtype, arriving, shape, size):
    virtual.check_gather(cuda, size, shape, dtype, arriving=arriving)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("transposed", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("size", [2, 4])
def test_sums(cuda, dtype, everywhere, transposed, shape, size):
    if virtual.is_summable(size, shape, transposed):
        virtual.check_sum(cuda, size, shape, dtype, transposed=transposed, everywhere=everywhere)
        return
    a, b = virtual.summands(size, shape, dtype, transposed)
    with pytest.raises(NotImplementedError, match="destination's rows of a transposed A"):
        virtual.virtual_ranks(cuda, size).matmul_sum(a, b, everywhere=everywhere)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_the_same_bits_however_handed_out(cuda, dtype, shape, size):
    virtual.check_sum_broadcasts(cuda, size, shape, dtype)


def test_sum_broadcasts_that_there_are_not(ranks):
    a = [draw(64, 64, seed=r, dtype=torch.bfloat16) for r in range(2)]
    for way in ("multicast", "switch"):
        with pytest.raises(NotImplementedError, match="no multicast address"):
            ranks(2).matmul_sum(a, a, everywhere=True, sum_broadcast=way)
    with pytest.raises(ValueError, match="sum_broadcast must be 'auto'"):
        ranks(2).matmul_sum(a, a, everywhere=True, sum_broadcast="ring")


def test_calls_back_to_back_keep_apart(cuda):
    virtual.check_calls_keep_apart(cuda, num_calls=300)


REPLAY = """
import json, math, os, torch
from axonn_ext.kernels import extension
from axonn_ext.verify.virtual import WORKSPACE, gathered
ranks = extension.cuda.VirtualRanks(2, workspace_bytes=WORKSPACE, timeout_seconds=2.0)
shards, others, _, _ = gathered(2, (256, 256, 128), "rows", torch.bfloat16, seed=1)
want = ranks.all_gather_matmul(shards, others)  # also loads the kernels
sums = ranks.matmul_sum(want, [w.t() for w in want])
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = ranks.all_gather_matmul(shards, others)
    added = ranks.matmul_sum(got, [g.t() for g in got])
equal = []
try:
    for _ in range(3):
        for output in (*got, *added):
            output.fill_(math.nan)
        graph.replay()
        pairs = zip((*got, *added), (*want, *sums), strict=True)
        equal += [torch.equal(mine, right) for mine, right in pairs]
    # Calls outside go on from the epochs that the replays have counted.
    equal.append(torch.equal(ranks.all_gather_matmul(shards, others)[0], want[0]))
    print(json.dumps([equal, None]), flush=True)
except RuntimeError as error:
    print(json.dumps([equal, [str(error), ranks.failure()]]), flush=True)
os._exit(0)  # if the context is lost, so is every destructor
"""


def test_calls_replay_in_a_graph(cuda):
    """The ranks are branches of the graph, which wait for each other.

    CUDA does not guarantee that branches run concurrently. If they run one after the other, a wait
    times out after two seconds and destroys the context, so the replays run in a separate process.
    """
    done = subprocess.run(
        [sys.executable, "-c", REPLAY],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    equal, failure = json.loads(done.stdout.splitlines()[-1])
    assert failure is None, f"the branches of the graph have not run side by side: {failure}"
    assert equal == [True] * 13


ABSENT = """
import json, torch
from axonn_ext.kernels import extension
ranks = extension.cuda.VirtualRanks(2, workspace_bytes=1 << 20, timeout_seconds=0.1)
shards = [torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)] * 2
try:
    {call}
    torch.cuda.synchronize()
    print("no error", flush=True)
except Exception as error:
    print(json.dumps([type(error).__name__, ranks.failure()]), flush=True)
import os; os._exit(0)  # the context is lost, and with it every destructor
"""


@pytest.mark.parametrize(
    ("call", "failure"),
    [
        ("ranks.all_gather_matmul(shards, shards, absent={1})", [0, 1, 0, 1, 0]),
        ("ranks.matmul_sum(shards, shards, absent={0})", [1, 0, 0, 1, 0]),
    ],
)
def test_a_rank_that_does_not_come_is_named(cuda, call, failure):
    """Reports rank, peer, chunk, expected and seen epoch. In its own process, as it traps."""
    program = textwrap.dedent(ABSENT).replace("{call}", call)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    error, found = json.loads(done.stdout.splitlines()[-1])
    assert error in {"AcceleratorError", "RuntimeError"}, done.stdout + done.stderr
    assert found == failure


# --- Ranks of their own --------------------------------------------------------------------------


@pytest.mark.parametrize("op, dim", OPS)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("size", ["small", "large"])
def test_values_and_gradients_of_the_ops(cuda, gpu_pool, size, world_size, op, dim):
    """Uses torch's symmetric memory; with fewer GPUs than ranks, ranks take turns on a GPU."""
    shapes = {"small": [(128, 256, 128), (64, 64, 192)], "large": [(1024, 512, 512)]}[size]
    for failures in gpu_pool(world_size).run(op_failures, op, dim, "fused", shapes, DTYPES):
        assert not failures, "\n".join(failures)


def check_sum_broadcasts() -> tuple[str, list[str]]:
    """Why there is no multicast, or "", and the results that differ from sums sent by copies."""
    rank, size = dist.get_rank(), dist.get_world_size()
    failures = []

    def total(a: Tensor, b: Tensor, way: str) -> Tensor:
        group = dist.group.WORLD.group_name
        return torch.ops.axonn._fused_matmul_sum(a, b, True, way, group, size, 60.0)

    for dtype in DTYPES:
        for m, n, k in [(64, 64, 192), (1024, 512, 512), (4096, 4096, 256)]:
            a = draw(m, k, seed=rank, dtype=dtype)
            b = draw(k, n, seed=50 + rank, dtype=dtype)
            want = total(a, b, "copy_engine")
            results = {"peer_stores": total(a, b, "peer_stores")}
            try:
                # Back to back: no call may overwrite data that a slower rank has yet to copy.
                for step in range(20):
                    results[f"multicast, {step}"] = total(a, b, "multicast")
                    results[f"auto, {step}"] = total(-a, b, "auto").neg()
            except NotImplementedError as error:
                if "no multicast address" not in str(error):
                    raise
                return str(error), failures
            # Ranks need not use the same way.
            ways = ("copy_engine", "multicast", "peer_stores")
            for step in range(len(ways)):
                results[f"mixed, {step}"] = total(a, b, ways[(rank + step) % len(ways)])
            failures += [
                f"rank {rank}: {way}, {dtype}, {(m, n, k)}"
                for way, got in results.items()
                if not torch.equal(got, want)
            ]
    return "", failures


def check_between_gpus(
    gpu_pool, world_size: int, check: Callable[[], tuple[str, list[str]]]
) -> None:
    """Fails with the ranks' failures, or skips if multicast is needed but not available."""
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"multicast is between GPUs: {world_size} are needed")
    answers = gpu_pool(world_size).run(check)
    for _, failures in answers:
        assert not failures, "\n".join(failures)
    if answers[0][0]:
        pytest.skip(answers[0][0])


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_sums_by_multicast_are_those_by_copies(cuda, gpu_pool, world_size):
    check_between_gpus(gpu_pool, world_size, check_sum_broadcasts)


def check_sums_in_the_switch() -> tuple[str, list[str]]:
    """Why there is no multicast, or "", and the results with more error than rounding explains.

    Each addend is rounded to the dtype once, and so is the sum. In fp32, a product has K roundings
    and a sum W - 1, each of at most 2^-24 (2^-23 if the switch truncates) of the magnitudes.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name
    failures = []
    for dtype in DTYPES:
        for m, n, k in [(64, 64, 192), (1040, 72, 64), (4096, 1024, 256)]:
            m = m // size * size
            each_a = [draw(m, k, seed=r, dtype=dtype) for r in range(size)]
            each_b = [draw(k, n, seed=50 + r, dtype=dtype) for r in range(size)]
            addends = [a.double() @ b.double() for a, b in zip(each_a, each_b, strict=True)]
            want = sum(addends)
            magnitude = sum(
                a.double().abs() @ b.double().abs() for a, b in zip(each_a, each_b, strict=True)
            )
            narrow = torch.finfo(dtype).eps / 2 * (sum(x.abs() for x in addends) + want.abs())
            limit = 1.01 * narrow + (k + size) * 2.0**-23 * magnitude
            for step in range(10):
                for way in ("switch", "any_order"):
                    try:
                        got = torch.ops.axonn._fused_matmul_sum(
                            each_a[rank], each_b[rank], True, way, group, size, 60.0
                        )
                    except NotImplementedError as error:
                        if "no multicast address" not in str(error):
                            raise
                        return str(error), failures
                    if not bool(((got.double() - want).abs() <= limit).all()):
                        failures.append(f"rank {rank}: {way}, {step}, {dtype}, {(m, n, k)}")
    return "", failures


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_sums_in_the_switch_are_as_exact_as_roundings_allow(cuda, gpu_pool, world_size):
    check_between_gpus(gpu_pool, world_size, check_sums_in_the_switch)


def calls_and_replays_in_turn(features: int, num_replays: int) -> list[bool]:
    """Whether the results are correct on two streams without further synchronization."""
    group, rank = dist.group.WORLD.group_name, dist.get_rank()
    a, b = (draw(features, features, seed=rank + first, dtype=torch.bfloat16) for first in (0, 50))

    def total() -> Tensor:
        return torch.ops.axonn._fused_matmul_sum(
            a, b, True, "auto", group, dist.get_world_size(), 60.0
        )

    want = total()
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        replayed = total()
    torch.cuda.synchronize()
    results = []
    for _ in range(num_replays):
        with torch.cuda.stream(other):
            graph.replay()
        results.append(total())
    torch.cuda.synchronize()
    return [torch.equal(result, want) for result in (*results, replayed)]


@pytest.mark.parametrize(("features", "num_replays"), [(64, 5), (512, 20)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_replays_are_ordered_with_other_calls(cuda, gpu_pool, world_size, features, num_replays):
    for equal in gpu_pool(world_size).run(calls_and_replays_in_turn, features, num_replays):
        assert equal == [True] * (num_replays + 1)


def check_gathers_over_nccl(shape: tuple[int, int, int]) -> None:
    """Checks all forms, with several calls in flight, interleaved with symmetric memory's calls."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def call(shard: Tensor, other: Tensor, arriving: str, transport: str) -> Tensor:
        return torch.ops.axonn._fused_all_gather_matmul(
            shard, other, arriving, transport, 16, dist.group.WORLD.group_name, size, 60.0
        )

    for dtype in DTYPES:
        for arriving in ("rows", "columns", "inner", "inner_a"):
            shards, others, want, torchs = gathered(size, shape, arriving, dtype, seed=7)
            mine = shards[rank], others[rank], arriving
            got = [call(*mine, "nccl") for _ in range(3)]
            check(call(*mine, "copy_engine"), want[rank], torchs[rank])
            got.append(call(*mine, "nccl"))
            for result in got:
                check(result, want[rank], torchs[rank])
                assert torch.equal(result, got[0])


@pytest.mark.parametrize("shape", [(256, 64, 192), (2048, 1536, 1024)], ids=name_of)
@pytest.mark.parametrize("world_size", [2, 4])
def test_gathers_over_nccl(cuda, gpu_pool, world_size, shape):
    # Processes that share a GPU take turns, but NCCL's kernels must run concurrently with the
    # kernels that wait for them.
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"a GPU is needed for each of {world_size} ranks")
    gpu_pool(world_size).run(check_gathers_over_nccl, shape)


def test_transports_that_there_are_not(cuda):
    shard = draw(64, 64, seed=1, dtype=torch.bfloat16)
    gather = torch.ops.axonn._fused_all_gather_matmul
    with pytest.raises(ValueError, match="transport must be 'auto'"):
        gather(shard, shard, "rows", "ring", 0, "a group", 2, 60.0)
    with pytest.raises(ValueError, match="nccl_sms must be at least 8, got 4"):
        gather(shard, shard, "rows", "nccl", 4, "a group", 2, 60.0)


def check_linears(layout: str) -> list[str]:
    # One rounding for each part of a sum and one for the result, in one or two reductions.
    limit = 8 * torch.finfo(torch.bfloat16).eps
    return linear_failures(
        every_grid(), layout, "fused", dtype=torch.bfloat16, sizes=(256, 512, 1024), limit=limit
    )


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_linear_on_every_grid(cuda, gpu_pool, world_size, layout):
    for failures in gpu_pool(world_size).run(check_linears, layout):
        assert not failures, "\n".join(failures)


# --- Over PCIe -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(512, 512, 256), (2048, 8192, 1024)], ids=name_of)
@pytest.mark.parametrize("size", [2, 4])
def test_rows_that_come_from_the_host(cuda, size, shape):
    link = cuda.EmulatedLink(size, workspace_bytes=WORKSPACE)
    for seed in range(3):  # new rows each time, as the workspace still holds the old ones
        shards, others, want, torchs = gathered(
            size, shape, "rows", torch.bfloat16, seed=1000 * seed
        )
        shards = shards[:1] + [shard.cpu().pin_memory() for shard in shards[1:]]
        check(link.all_gather_matmul(shards, others[0]), want[0], torchs[0])
