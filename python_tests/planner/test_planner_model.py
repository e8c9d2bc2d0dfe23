"""The planner's model of a rank: products and parameters add up to the whole model's."""

from __future__ import annotations

import random

import pytest

from axonn_ext.planner import Job, Options
from axonn_ext.planner.job import violations
from axonn_ext.planner.step.parameters import parameters_by_axes, parameters_of_rank
from axonn_ext.planner.step.program import make_program
from axonn_ext.planner.step.rank import Rank
from axonn_ext.spec.grid import AXES, GridShape, divisors, grids_of
from axonn_ext.spec.model import ModelConfig


def random_model(rng: random.Random) -> ModelConfig:
    family, heads = rng.choice(["gpt2", "llama"]), rng.choice([1, 2, 3, 4, 6, 8, 12])
    return ModelConfig(
        vocab_size=rng.choice([7, 48, 64, 96]),
        hidden_size=heads * rng.choice([2, 4, 6]),
        num_layers=rng.choice([1, 2, 5]),
        num_heads=heads,
        sequence_length=rng.choice([3, 4, 10, 16]),
        family=family,
        num_kv_heads=None if family == "gpt2" else rng.choice(divisors(heads)),
        intermediate_size=rng.choice([None, 24, 35]),
        tie_embeddings=rng.random() < 0.5,
    )


def test_micro_batches_must_divide_the_batch() -> None:
    job = Job(ModelConfig(64, 32, 1, 4, 8), GridShape(), Options(micro_batches=3), 16)
    assert list(violations(job)) == ["batch: 16 sequences must be divisible by micro_batches=3"]


def test_parameters_of_a_rank_add_up() -> None:
    """The elements of all ranks, with each replica counted once, add up to the model's."""
    rng = random.Random(2)
    for _ in range(200):
        model, grid = random_model(rng), GridShape(*(rng.choice([1, 2]) for _ in range(4)))
        job = Job(model, grid, Options(), 48)
        if list(violations(job)):
            continue
        assert parameters_of_rank(job) == sum(n for n, _ in parameters_by_axes(Rank(job)))
    one = Job(random_model(rng), GridShape(), Options(), 1)
    assert parameters_of_rank(one) == one.model.num_parameters()


def test_products_of_all_ranks_are_the_models() -> None:
    """The flops of a step's products on all ranks equal `flops_per_token` without attention."""
    model = ModelConfig(96, 48, 3, 4, 16)
    for sizes in ((1, 1, 1, 1), (2, 2, 1, 1), (4, 1, 2, 2), (1, 2, 4, 2)):
        job = Job(model, GridShape(*sizes), Options(micro_batches=2), 32)
        assert not list(violations(job))
        program = make_program(job)
        products = sum(
            task.matmul.flops * repeats * program.num_micro_batches * job.grid.size
            for tasks, repeats in program.micro_batch()
            for task in tasks
            if task.matmul is not None
        )
        attention = 3 * 2 * model.hidden_size * model.sequence_length * model.num_layers
        tokens = job.batch_size * model.sequence_length
        assert products == tokens * (model.flops_per_token() - attention)


def test_every_factorisation_once() -> None:
    for ranks in (1, 2, 12, 64, 30):
        grids = list(grids_of(ranks))
        assert len(set(grids)) == len(grids)
        assert all(g.size == ranks and g.pipe == 1 for g in grids)
        brute = [
            (x, y, z, d)
            for x in range(1, ranks + 1) for y in range(1, ranks // x + 1)
            for z in range(1, ranks // (x * y) + 1) for d in range(1, ranks // (x * y * z) + 1)
            if x * y * z * d == ranks
        ]  # fmt: skip
        assert sorted((g.x, g.y, g.z, g.data) for g in grids) == sorted(brute)
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_neighbours_along_an_axis_are_as_far_apart_as_ranks_are_laid_out() -> None:
    grid = GridShape(x=2, y=3, z=5, data=7)
    assert [grid.inner(axis) for axis in ("x", "y", "z", "pipe", "data")] == [1, 2, 6, 30, 30]
    assert grid.size == 2 * 3 * 5 * 7
    assert AXES == ("data", "pipe", "z", "y", "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "hidden_size=32 must be divisible by num_heads=5"),
        ({"hidden_size": 0}, "hidden_size must be a whole number >= 1, got 0"),
        ({"hidden_size": 2.5}, "hidden_size must be a whole number >= 1, got 2.5"),
        ({"family": "bert"}, "family must be one of gpt2, llama.*, got 'bert'"),
        ({"num_kv_heads": 2}, "family 'gpt2' has as many as num_heads=4"),
        ({"num_kv_heads": 2, "family": "falcon"}, "family 'falcon' has one; other families"),
        ({"num_kv_heads": 0}, "num_kv_heads must be a whole number >= 1, got 0"),
    ],
)
def test_wrong_models_are_refused(changes: dict[str, object], message: str) -> None:
    sizes: dict[str, object] = {
        "vocab_size": 64, "hidden_size": 32, "num_layers": 1, "num_heads": 4, "sequence_length": 8
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        ModelConfig(**(sizes | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "rows"}, "layout must be one of sharded, replicated, got 'rows'"),
        ({"dtype": "fp8"}, "dtype must be one of bf16, fp16, fp32, got 'fp8'"),
        ({"layout": "replicated", "heads_over_y": True}, "heads_over_y needs layout 'sharded'"),
        ({"micro_batches": 0}, "micro_batches must be a whole number >= 1, got 0"),
    ],
)
def test_wrong_options_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**changes)  # type: ignore[arg-type]
