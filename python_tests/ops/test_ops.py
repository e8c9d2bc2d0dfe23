"""The fused ops: values and gradients against float64, opcheck, errors."""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch
import torch.distributed as dist

import axonn_ext
from axonn_ext import Grid, GridShape, nn, ops
from axonn_ext.kernels import extension
from axonn_ext.ops import specs
from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import AxisGroup
from axonn_ext.verify.ranks import OPS, Case, draw
from grids import bound, grid_of, relative_error
from named_groups import group_named
from op_shapes import documented_shapes
from worker_pool import WorkerError, WorkerPool

# M, K, N of the whole product for W ranks: M and K are W times these. 1, odd, larger, empty.
SHAPES = [(1, 1, 1), (3, 5, 7), (33, 64, 129), (0, 4, 3), (4, 0, 3), (2, 3, 0)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def world() -> dist.ProcessGroup:
    return dist.group.WORLD


def gathered(shape: tuple[int, int], dim: int, world_size: int) -> torch.Tensor:
    parts = [
        draw(*shape, dtype=torch.float64, rank=r, requires_grad=False) for r in range(world_size)
    ]
    return torch.cat(parts, dim)


def check_op(op: str, dim: int, algorithm: str) -> list[str]:
    failures = []
    function = functools.partial(getattr(ops, op), algorithm=algorithm)
    rank, size = dist.get_rank(), dist.get_world_size()
    for m, k, n in SHAPES:
        for dtype in DTYPES:
            for transposed in (False, True):
                case = Case(op, dim, m, k, n)
                leaves = [
                    tuple(draw(*s, dtype=torch.float64, rank=r) for s in (case.a, case.b))
                    for r in range(size)
                ]
                want = case.reference(leaves)
                a, b = (draw(*s, dtype=dtype, rank=rank) for s in (case.a, case.b))
                operands = [t.t().contiguous().t() if transposed else t for t in (a, b)]
                y = case.run(function, *operands)
                dys = [
                    draw(*w.shape, dtype=torch.float64, rank=100 + r) for r, w in enumerate(want)
                ]
                if case.what.is_one:
                    dys = [dys[0]] + [torch.zeros_like(d) for d in dys[1:]]
                torch.autograd.backward(want, [d.detach() for d in dys])
                own_dy = dys[0 if case.what.is_one else rank]
                y.backward(own_dy.detach().to(dtype))
                errors = {
                    "y": relative_error(y, want[rank]),
                    "da": relative_error(a.grad, leaves[rank][0].grad),
                    "db": relative_error(b.grad, leaves[rank][1].grad),
                }
                limit = bound(dtype, max(m, k, n, 1) * size)
                failures += [
                    f"{op} {dim=} {(m, k, n)} {dtype} {transposed=} {name}: {e:.1e} > {limit:.1e}"
                    for name, e in errors.items()
                    if not e <= limit
                ]
    return failures


@pytest.mark.parametrize("algorithm", ["fused", "chunked", "sequential"])
@pytest.mark.parametrize("op, dim", OPS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_and_gradients(pool, world_size, op, dim, algorithm):
    for failures in pool(world_size).run(check_op, op, dim, algorithm):
        assert not failures, "\n".join(failures)


def gather_in_own_layouts(columns: int) -> float:
    """The error of a product whose shards lie row-major on rank 0, column-major on the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shards = [draw(4, 6, dtype=torch.float64, rank=r, requires_grad=False) for r in range(size)]
    b = draw(6, columns, dtype=torch.float64, rank=0, requires_grad=False)
    own = shards[rank] if rank == 0 else shards[rank].t().contiguous().t()
    y = ops.all_gather_matmul(own, b, world(), algorithm="fused")
    return relative_error(y, torch.cat(shards) @ b)


@pytest.mark.parametrize("columns", [1, 64])  # with many, shards are joined before the product
def test_ranks_may_hold_their_shards_in_other_layouts(pool, columns):
    assert max(pool(4).run(gather_in_own_layouts, columns)) <= bound(torch.float64, 6)


def check_collectives(algorithm: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    axis = AxisGroup("x", world().group_name, size, rank, world())
    # 9001 columns of fp32 pass the size from which an all-reduce is cut into parts.
    for shape in [(size, 3), (2 * size, 9001), (0, 3), (size, 1, 5)]:
        for dtype in (*DTYPES, torch.int64):
            parts = [
                (100 * draw(*shape, dtype=torch.float32, rank=r, requires_grad=False)).to(dtype)
                for r in range(size)
            ]
            gather = collectives.all_gather(parts[rank], axis, dim=1, algorithm=algorithm)
            assert torch.equal(gather, torch.cat(parts, 1))
            top = collectives.all_reduce(parts[rank], axis, reduce_op="max", algorithm=algorithm)
            assert torch.equal(top, torch.stack(parts).amax(0))
            total = sum(p.double() for p in parts)
            limit = 0.0 if dtype == torch.int64 else bound(dtype, size)
            whole = collectives.all_reduce(parts[rank], axis, algorithm=algorithm)
            assert relative_error(whole, total) <= limit
            part = collectives.reduce_scatter(parts[rank], axis, algorithm=algorithm)
            assert relative_error(part, total.chunk(size)[rank]) <= limit


def sums_that_overflow_on_the_way(algorithm: str) -> list[float]:
    """The first three ranks add up to 79000, which fp16 cannot hold; all four to 40000."""
    rank, size = dist.get_rank(), dist.get_world_size()
    axis = AxisGroup("x", world().group_name, size, rank, world())
    own = torch.full((4, 2), [40000.0, 38000.0, 1000.0, -39000.0][rank], dtype=torch.float16)
    whole = collectives.all_reduce(own, axis, algorithm=algorithm)
    part = collectives.reduce_scatter(own, axis, algorithm=algorithm)
    product = ops.matmul_all_reduce(
        own, torch.eye(2, dtype=torch.float16), axis.process_group, algorithm=algorithm
    )
    return [t.flatten()[0].item() for t in (whole, part, product)]


@pytest.mark.parametrize("algorithm", ["fused", "chunked", "sequential"])
def test_sums_of_fp16_over_ranks_are_added_in_fp32(pool, algorithm):
    for sums in pool(4).run(sums_that_overflow_on_the_way, algorithm):
        assert sums == [40000.0] * 3


@pytest.mark.parametrize("algorithm", ["fused", "chunked", "sequential"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives(pool, world_size, algorithm):
    pool(world_size).run(check_collectives, algorithm)


def repeat_bits() -> list[list[float]]:
    a = draw(64, 96, dtype=torch.float32, rank=dist.get_rank(), requires_grad=False)
    b = draw(96, 32, dtype=torch.float32, rank=dist.get_rank(), requires_grad=False)
    first = ops.matmul_all_reduce(a, b, world())
    for _ in range(50):
        again = ops.matmul_all_reduce(a, b, world())
        assert torch.equal(first, again)
    return first.tolist()


def test_same_bits_on_every_rank_and_every_call(pool):
    results = pool(4).run(repeat_bits)
    assert all(result == results[0] for result in results)


def sums_in_any_order(algorithm: str) -> tuple[bool, str]:
    """Whether it gives what the deterministic sum does, and the error of ranks that differ."""
    rank = dist.get_rank()
    results = []
    for deterministic in (True, False):
        a = draw(64, 96, dtype=torch.float32, rank=rank)
        b = draw(96, 32, dtype=torch.float32, rank=rank)
        y = ops.matmul_all_reduce(a, b, world(), algorithm=algorithm, deterministic=deterministic)
        y.sum().backward()
        results.append((y, a.grad, b.grad))
    group = dist.new_group()
    message = "no error"
    try:
        ops.matmul_all_reduce(a, b, group, algorithm=algorithm, deterministic=rank == 0)
    except RuntimeError as error:
        message = str(error)
    return all(torch.equal(*pair) for pair in zip(*results, strict=True)), message


@pytest.mark.parametrize("algorithm", ["auto", "fused", "chunked", "sequential"])
def test_on_a_cpu_sums_are_deterministic_in_any_case(pool, algorithm):
    answers = pool(2).run(sums_in_any_order, algorithm)
    assert all(equal for equal, _ in answers)
    assert all("matmul_all_reduce" in message for _, message in answers)
    assert any("deterministic=0" in message for _, message in answers)


def samples_of_documented_shapes(*group: object) -> list[tuple[object, tuple[object, ...]]]:
    """A call for each line of shapes in the documentation of the ops of one group."""
    known = dict(zip(("group_name", "group_size", "algorithm"), group, strict=True))
    sizes = {"W": group[1], "M": 4, "K": 8, "N": 6}
    samples = []
    for spec in (*specs.collectives.SPECS, *specs.matmuls.SPECS):
        for shapes in documented_shapes(spec, sizes):
            tensors = {
                name: draw(*shape, dtype=torch.float32, rank=dist.get_rank())
                for name, shape in shapes.tensors.items()
            }
            options = {"reduce_op": "sum", "deterministic": True}
            arguments = options | known | shapes.arguments | tensors
            values = tuple(arguments[name] for name in spec.arguments)
            samples.append((getattr(torch.ops.axonn, spec.name), values))
    return samples


def sums_of_gathered_parts(algorithm: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of 256 on rank 0 and 1 on each other one, in bf16; of random numbers, in fp32.

    The operands are so narrow that parts which arrive are not worth a copy into one piece.
    """
    rank, size, group = dist.get_rank(), dist.get_world_size(), world()
    gather = functools.partial(ops.all_gather_matmul, gather_dim=1, algorithm=algorithm)
    gather_rhs = functools.partial(ops.matmul_all_gather_rhs, gather_dim=0, algorithm=algorithm)
    part = torch.zeros(1, 4, dtype=torch.bfloat16)
    part[0, 0] = 256 if rank == 0 else 1
    ones = torch.ones(4 * size, 1, dtype=torch.bfloat16)
    counted = [gather(part, ones, group), gather_rhs(ones.t(), part.t(), group)]
    own = draw(3, 64, dtype=torch.float32, rank=rank, requires_grad=False)
    common = draw(64 * size, 2, dtype=torch.float32, rank=99, requires_grad=False)
    return counted, [gather(own, common, group), gather_rhs(common.t(), own.t(), group)]


@pytest.mark.parametrize("algorithm", ["fused", "chunked", "sequential"])
def test_sums_of_gathered_parts_are_rounded_once_and_the_same_on_all(pool, algorithm):
    (_, want), *_ = of_ranks = pool(4).run(sums_of_gathered_parts, algorithm)
    for counted, same in of_ranks:
        # 259 lies between the even 258 and 260; 256 + 1 would be rounded to 256 each time.
        assert [sums.item() for sums in counted] == [260, 260]
        assert all(torch.equal(a, b) for a, b in zip(same, want, strict=True))


def check_opcheck() -> None:
    group = (world().group_name, dist.get_world_size(), "fused")
    rank, axonn = dist.get_rank(), torch.ops.axonn
    a, b = (draw(8, 8, dtype=torch.float32, rank=rank) for _ in range(2))
    samples = [
        *samples_of_documented_shapes(*group),
        (axonn.local_rows, (torch.arange(8), 2, 4, 8, -100, False, "ids", rank)),
        (axonn.fill_random_, (torch.empty(4, 4), [8, 8], [4, 0], "w", 1, "normal", 0.0, 1.0)),
    ]
    labels, place = torch.tensor([0, 9, -100, 15, 8, 7, 3, 1]), (8 * rank, -100)
    loss = (a, labels, *place, False, *group)
    dy, statistics = (t.detach() for t in axonn.cross_entropy_forward(*loss))
    backward = (dy, a.detach().clone(), labels, statistics, *place)
    samples += [
        (axonn.cross_entropy_forward, loss),
        (axonn.cross_entropy_backward, backward),
        (axonn.cross_entropy_backward_, backward),
    ]
    names, size = [group[0]] * 3, group[1]
    for sizes, sharded, dims, save, algorithm in (
        ([size, 1, 1], True, (0, 0), False, "fused"),
        ([size, 1, 1], True, (0, 0), True, "fused"),
        ([size, 1, 1], False, (0, 0), False, "fused"),
        ([1, size, 1], True, (0, 0), False, "fused"),
        ([1, size, 1], True, (0, 1), False, "fused"),
        ([1, 1, size], True, (0, 0), False, "fused"),
        ([1, 1, size], True, (0, 0), True, "sequential"),
    ):
        linear = (names, sizes, sharded, *dims)
        wide_bias = draw(8 * sizes[2], dtype=torch.float32, rank=rank)
        forward = (a, b, wide_bias, *linear, save, save, algorithm, True)
        samples.append((axonn.linear_forward, forward))
        y, full_x, full_weight = (t.detach() for t in axonn.linear_forward(*forward))
        kept = (save and sizes[0] > 1, save and sizes[2] > 1)
        x, weight = full_x if kept[0] else a, full_weight if kept[1] else b
        backward = (torch.randn_like(y), x.detach(), weight.detach(), *kept, [True] * 3)
        samples.append((axonn.linear_backward, (*backward, *linear, algorithm, True)))
    covered = {op.default._schema.name for op, _ in samples}
    # With an underscore: what kernels of the others call, on CUDA only, below autograd.
    public = {name for name in torch._C._dispatch_get_all_op_names()
              if name.startswith("axonn::") and not name.startswith("axonn::_")}  # fmt: skip
    assert covered == public
    for op, arguments in samples:
        torch.library.opcheck(op, arguments)


def test_opcheck_of_every_op(pool):
    pool(2).run(check_opcheck)


def message_of(function, *args, **kwargs) -> str:
    """The error, which must come on every rank and leave the group usable."""
    try:
        function(*args, **kwargs)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "no error"


def collect_messages() -> list[str]:
    matrix, group = torch.ones(4, 4), world()
    messages = [
        message_of(ops.matmul_reduce_scatter, torch.ones(3, 4), matrix, group),
        message_of(ops.matmul_reduce_scatter, matrix, torch.ones(4, 3), group, scatter_dim=1),
        message_of(ops.all_gather_matmul, torch.ones(4, 3), matrix, group),
        message_of(ops.all_gather_matmul, torch.ones(4, 3), matrix, group, gather_dim=1),
        message_of(ops.all_gather_matmul, matrix, matrix, group, gather_dim=2),
        message_of(ops.matmul_all_reduce, matrix, matrix.double(), group),
        message_of(ops.matmul_all_reduce, matrix.int(), matrix.int(), group),
        message_of(ops.matmul_all_reduce, torch.ones(4), matrix, group),
        message_of(ops.matmul_all_reduce, matrix, matrix, group, algorithm="best"),
        message_of(ops.matmul_all_reduce, matrix, matrix, 3),
    ]
    ops.matmul_all_reduce(matrix, matrix, group)
    return messages


def test_error_messages(pool):
    expected = [
        "ValueError: matmul_reduce_scatter: a.size(0)=3 must be divisible by the group size 2",
        "ValueError: matmul_reduce_scatter: b.size(1)=3 must be divisible by the group size 2",
        "ValueError: all_gather_matmul: a_shard.size(1)=3 must equal b.size(0)=4",
        "ValueError: all_gather_matmul: a_shard.size(1) * group size=6 must equal b.size(0)=4",
        "ValueError: all_gather_matmul: gather_dim=2 must be in [0, 2)",
        "TypeError: matmul_all_reduce: a has dtype Float but b has Double",
        "TypeError: matmul_all_reduce: a has dtype Int, expected float32, float64, bfloat16 or "
        "float16",
        "ValueError: matmul_all_reduce: a must be a matrix, got shape [4]",
        "ValueError: matmul_all_reduce: algorithm must be 'auto', 'fused', 'chunked' or "
        "'sequential', got 'best'",
        "TypeError: group must be a ProcessGroup or its name, got int",
    ]
    for messages in pool(2).run(collect_messages):
        assert messages == expected


def differentiate_twice(shape: GridShape, options: dict[str, bool]) -> str:
    """Also of operands that were gathered: their copies have no history."""
    layer = nn.Linear(8, 8, grid=grid_of(shape), role="expand", **options)
    x = grid_of(shape).shard(torch.ones(8, 8), layer.input_dims).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError) as error:
        dx.sum().backward()
    layer(x)  # the groups are still of use
    return str(error.value)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (GridShape(x=2), {}),
        (GridShape(x=2, z=2), {"save_gathered": True, "reshard_after_forward": False}),
    ],
    ids=["shards", "gathered"],
)
def test_second_derivative_is_refused(pool, shape, options):
    for message in pool(shape.size).run(differentiate_twice, shape, options):
        assert "linear_backward" in message and "create_graph=False" in message


def mixed_strides() -> None:
    """One rank's shard lies transposed in memory, the other's does not: the same call."""
    rank, shard = dist.get_rank(), torch.arange(12.0).view(4, 3)
    shard = shard.t().contiguous().t() if rank else shard
    got = ops.matmul_all_gather_rhs(torch.eye(4), shard, world())
    assert torch.equal(got, torch.cat([shard, shard], 1))


def test_strides_need_not_agree(pool):
    pool(2).run(mixed_strides)


def call_different_shapes(algorithm: str) -> str:
    """On a group of its own: it is broken afterwards."""
    group = dist.new_group(list(range(dist.get_world_size())), use_local_synchronization=True)
    rows = 4 + 2 * dist.get_rank()
    try:
        ops.all_gather_matmul(torch.ones(rows, 4), torch.ones(4, 4), group, algorithm=algorithm)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
    try:
        ops.matmul_all_reduce(torch.ones(4, 4), torch.ones(4, 4), group, algorithm="fused")
    except RuntimeError as error:
        assert "cannot be used any more" in str(error)
    return first


def test_ranks_that_disagree_get_an_error_at_once(pool):
    first, second = pool(2).run(call_different_shapes, "fused")
    four, six = (f"a_shard=float32[{rows},4]" for rows in (4, 6))
    op = "all_gather_matmul"
    assert f"{op} {four} gather_dim=0 algorithm=fused: rank 0 waited for rank 1" in first
    assert f"called {op} {six} (here {four}) gather_dim=0" in first
    assert f"{op} {six} gather_dim=0 algorithm=fused: rank 1 waited for rank 0" in second
    assert f"called {op} {four} (here {six}) gather_dim=0" in second
    first, second = pool(2).run(call_different_shapes, "auto")
    assert "waited for rank 1" in first and "failed; see the error of that rank" in first
    assert f"{op} {six} gather_dim=0" in second and f"called {op} {four} (here {six})" in second


def join_again_after_an_error() -> list[float]:
    rank, size, gather = dist.get_rank(), dist.get_world_size(), torch.ops.axonn.all_gather
    with group_named("again", 0) as name, pytest.raises(RuntimeError, match="waited for"):
        gather(torch.ones(1 + rank), 0, name, size, "fused")
    with group_named("again", 1) as name:
        return gather(torch.full((1,), float(rank)), 0, name, size, "fused").tolist()


def test_a_group_that_failed_breaks_no_later_one_of_its_name(pool):
    assert pool(2).run(join_again_after_an_error) == [[0.0, 1.0]] * 2


def wait_for_a_rank_that_died() -> str:
    """Rank 1 of a group of its own ends in the middle of a run; what rank 0 is told."""
    grid = Grid(x=2)
    axis = grid.axis("x")
    collectives.all_reduce(torch.ones(4), axis)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        collectives.all_reduce(torch.ones(4), axis)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "no error"


def test_death_of_a_rank_is_an_error_that_names_it():
    pool = WorkerPool(2)
    try:
        with pytest.raises(WorkerError, match="rank 1: the process ended"):
            pool.run(wait_for_a_rank_that_died)
        assert pool.answers[0] == (
            "all_reduce: rank 0 waited for rank 1 of group x (ranks 0, 1), which has died"
        )
    finally:
        pool.close()


def train_and_watch(steps: int) -> list[int]:
    """Bytes of symmetric memory after each training step."""
    grid = grid_of(GridShape(x=2, y=2))
    model = axonn_ext.models.build(
        axonn_ext.models.ModelConfig(
            vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, sequence_length=16
        ),
        grid,
        axonn_ext.models.ParallelConfig(),
        seed=1,
    )
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(64, (4, 16), generator=generator)
    in_use = []
    for _ in range(steps):
        model.loss(token_ids, token_ids, float(token_ids.numel())).backward()
        axonn_ext.sync_gradients(model)
        axonn_ext.clip_grad_norm_(model, 1.0)
        model.zero_grad()
        in_use.append(axonn_ext.symmetric_memory_bytes_in_use())
    return in_use


def test_training_takes_no_symmetric_memory_after_its_first_step(pool) -> None:
    for in_use in pool(4).run(train_and_watch, 6):
        assert in_use[0] > 0
        assert len(set(in_use)) == 1


def test_fused_on_cuda_needs_the_module_that_has_it():
    """Also holds the signatures of both sides to each other, where both are built."""
    assert extension._C.has_fused_on_cuda() is (extension.cuda is not None)
