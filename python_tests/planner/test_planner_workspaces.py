"""The memory of the fused ops' workspaces on GPUs, computed by hand and from a step's products."""

from __future__ import annotations

import dataclasses
import random

import pytest

from axonn_ext import _C
from axonn_ext.planner import Job, Memory, Options, Request, memory_of, plan
from axonn_ext.planner.job import violations
from axonn_ext.planner.memory.workspaces import memory_bytes
from axonn_ext.planner.step.program import make_program
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import ALGORITHMS, Overlap
from planner_machines import machine_of

MIB = 1 << 20
GRID = GridShape(2, 2, 2)
GPT = ModelConfig(8192, 1024, 2, 8, 512)  # tied
LLAMA = ModelConfig(
    8192, 1024, 2, 8, 512, family="llama", intermediate_size=4864, tie_embeddings=False
)


def job_of(model: ModelConfig, grid: GridShape = GRID, **options: object) -> Job:
    return Job(model, grid, Options(**{"overlap": None, **options}), 16)  # type: ignore[arg-type]


def with_options(job: Job, **options: object) -> Job:
    return dataclasses.replace(job, options=dataclasses.replace(job.options, **options))


def workspaces_of(job: Job) -> int:
    """The additional memory of "auto" if it may choose "fused"."""
    auto = with_options(job, algorithm="auto")
    without, memory = memory_of(auto), memory_of(auto, auto_fuses=True)
    more = memory.buffers - without.buffers
    assert memory == without._replace(buffers=without.buffers + more)
    return more


def test_memory_grows_as_that_of_the_ops() -> None:
    draw = random.Random(3)
    sizes = [2 * MIB - 132096, 2 * MIB - 132095, *(1 << n for n in range(48))]
    sizes += [draw.randrange(1, 1 << draw.randrange(1, 48)) for _ in range(10_000)]
    for size in sizes:
        assert memory_bytes(size) == _C.fused_workspace_bytes(size), size


# There are m = 16 * 512 / 2 = 4096 rows in bf16. Over x, out and down sum [m, 1024 / 2], 4 MiB, and
# the other Linears' dx is as large. Over y, the largest sums are GPT's logits, [m, 8192 / 2],
# 32 MiB, and Llama's gate and up, [m, 4864], 38 MiB, rounded up to 40. All-reduces need twice as
# much: 76 MiB, rounded up to 80. Over z, the largest is up's weight: [4096 / 2, 512] in GPT, whose
# head is tied, 2 MiB; and [4864, 512] in Llama, 4.75 MiB, rounded up to 6.
@pytest.mark.parametrize(
    ("model", "layout", "mebibytes"),
    [
        (GPT, "sharded", (4, 32, 2)),
        (GPT, "replicated", (8, 64, 2)),
        (LLAMA, "sharded", (4, 40, 6)),
        (LLAMA, "replicated", (8, 80, 6)),
    ],
    ids=lambda value: value.family if isinstance(value, ModelConfig) else str(value),
)
def test_each_group_has_a_workspace_for_its_largest_call(
    model: ModelConfig, layout: str, mebibytes: tuple[int, int, int]
) -> None:
    job = job_of(model, layout=layout)
    assert workspaces_of(job) == sum(132096 + each * MIB for each in mebibytes)
    # Keeping or recomputing activations does not change the calls.
    for options in (
        {"save_gathered": True}, {"reshard_after_forward": False}, {"recompute": "full"},
    ):  # fmt: skip
        assert workspaces_of(with_options(job, **options)) == workspaces_of(job)
    # With overlap, the weights of Linears are gathered separately.
    x_and_y = sum(132096 + each * MIB for each in mebibytes[:2])
    assert workspaces_of(with_options(job, overlap=Overlap())) == x_and_y


def test_the_calls_are_those_of_the_step() -> None:
    draw = random.Random(1)
    num_seen = 0
    while num_seen < 100:
        model = ModelConfig(
            draw.choice([512, 8191, 50257]), 512, 2, 8, 128, tie_embeddings=draw.random() < 0.5,
            family=draw.choice(["gpt2", "llama", "qwen3"]),
        )  # fmt: skip
        overlap, layout = draw.choice([None, Overlap()]), draw.choice(["sharded", "replicated"])
        grid = GridShape(*(draw.choice([1, 2, 4]) for _ in range(4)))
        job = Job(model, grid, Options(layout=layout, overlap=overlap), draw.choice([16, 64]))
        if list(violations(job)):
            continue
        num_seen += 1
        largest: dict[str, int] = {}
        for task in (task for part in make_program(job).parts for task in part if task.matmul):
            m, n, k, layout = task.matmul
            sums = [(c.axis, m * n * (1 + (c.kind == "all_reduce"))) for c in task.after]
            if overlap is None and task.scatter is not None:
                sums.append(("z", m * n))
            if overlap is None and task.gather is not None:
                sums.append(("z", n * k))
            for axis, elements in sums:
                largest[axis] = max(elements, largest.get(axis, 0))
        assert workspaces_of(job) == sum(memory_bytes(2 * e) for e in largest.values()), job


# The peak is in a block's backward: its up Linear gathers and sums a weight over z, or its down
# Linear sums dx over y, while x is kept.
@pytest.mark.parametrize(
    ("grid", "options", "in_workspaces"),
    [
        (GridShape(z=2), {}, 4096 * 1024),  # up's weight
        (GridShape(2, 2), {"save_gathered": True}, 16 * 512 * 4096 // 2),  # [m, 4096 / 2]
    ],
    ids=["weight", "sum"],
)
def test_what_lies_in_a_workspace_counts_once(
    grid: GridShape, options: dict[str, object], in_workspaces: int
) -> None:
    model = dataclasses.replace(GPT, vocab_size=64, num_layers=1)
    sequential = memory_of(job_of(model, grid, algorithm="sequential", **options))
    job = job_of(model, grid, algorithm="fused", **options)
    buffers = sequential.buffers - 2 * in_workspaces + workspaces_of(job)
    assert memory_of(job) == sequential._replace(buffers=buffers)


def test_only_fused_ops_have_workspaces() -> None:
    def held(algorithm: str, dtype: str = "bf16", **where: object) -> Memory:
        return memory_of(job_of(GPT, algorithm=algorithm, dtype=dtype), **where)

    for algorithm in ALGORITHMS:
        for where in ({"device": "cpu"}, {"device": "cpu", "auto_fuses": True}):
            assert held(algorithm, **where) == held("sequential", device="cpu")
        assert held(algorithm, "fp32", auto_fuses=True) == held("sequential", "fp32")
    assert held("chunked", auto_fuses=True) == held("auto") == held("sequential")
    assert held("fused").total > held("sequential").total
    assert held("fused").total <= held("auto", auto_fuses=True).total


def test_plans_have_workspaces_where_auto_may_fuse() -> None:
    for share, auto_fuses in ((0.0, False), (0.5, True)):
        machine = machine_of(hidden_share=share)
        for config in plan(Request(GPT, "small", 16, machine, 64)).configs:
            assert config.memory == memory_of(config.job, auto_fuses=auto_fuses)
    on_cpus = dataclasses.replace(machine_of(hidden_share=0.5), device="cpu")
    config = plan(Request(GPT, "small", 16, on_cpus, 64)).configs[0]
    assert config.memory == memory_of(config.job, device="cpu")
