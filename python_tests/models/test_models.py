"""GPT-2 and Llama on every grid against one process of plain PyTorch: loss, gradients, norm."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from axonn_ext import (
    GridShape,
    clip_grad_norm_,
    full_gradients,
    full_state_dict,
    load_full_state_dict,
    models,
    sync_gradients,
)
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.models.checks import check_token_ids
from axonn_ext.models.plain import PlainTransformer
from grids import factorisations, grid_of, turns
from model_cases import BATCH, CONFIGS, GPT2, LENGTH, LLAMA, MAX_NORM, random_batch, sampled

PARALLEL = {
    "sharded": ParallelConfig(),
    "replicated": ParallelConfig(layout="replicated"),
    "heads_over_y": ParallelConfig(heads_over_y=True),
    "kept": ParallelConfig(save_gathered=True, reshard_after_forward=False),
    "recompute": ParallelConfig(recompute="full"),
    "sequential": ParallelConfig(algorithm="sequential"),
}
GRIDS = {
    1: [GridShape()],
    2: factorisations(2),
    4: factorisations(4),
    8: [GridShape(2, 2, 2), GridShape(2, 2, 1, 2), GridShape(1, 2, 2, 2), GridShape(2, 1, 2, 2)],
}


def reference(config: ModelConfig, state: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = PlainTransformer(config).to(dtype)
    model.load_state_dict(state)
    loss = model.loss(*random_batch())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return {"loss": loss.detach(), "norm": norm, **grads}


def run_on_grid(
    shape: GridShape, config: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype,
    micro_batches: int = 1,
) -> dict[str, float]:  # fmt: skip
    """Relative errors of the loss, the norm and every clipped gradient."""
    grid = grid_of(shape)
    model = models.build(config, grid, parallel, seed=2, dtype=dtype)
    want = reference(config, full_state_dict(model), dtype)
    ids, labels = random_batch()
    num_labels = None if micro_batches == 1 else float((labels != -100).sum())
    loss = torch.zeros((), dtype=dtype)
    for micro_ids, micro_labels in zip(
        ids.chunk(micro_batches), labels.chunk(micro_batches), strict=True
    ):
        own = {0: ("data", "z")}
        part = model.loss(grid.shard(micro_ids, own), grid.shard(micro_labels, own), num_labels)
        part.backward()
        loss += part.detach()
    sync_gradients(model)
    norm = clip_grad_norm_(model, MAX_NORM)
    got = {"loss": loss, "norm": norm, **full_gradients(model)}
    assert got.keys() == want.keys()
    # Without rotary positions, the keys' bias does not change the scores, so its gradient is 0
    # except for rounding. Its error is relative to the gradient of the queries' bias.
    scale = {name: want[name.replace("k_proj.bias", "q_proj.bias")] for name in want}
    return {n: ((got[n] - want[n]).norm() / scale[n].norm()).item() for n in want}


def check_grids(
    shapes: list[GridShape], config: ModelConfig, parallel: ParallelConfig
) -> list[str]:
    failures = []
    for shape in shapes:
        assert not models.check(config, parallel, shape, batch_size=BATCH), shape
        # In fp64, anything above 1e-11 is an error of the algorithm, not rounding.
        errors = run_on_grid(shape, config, parallel, torch.float64)
        failures += [f"{shape} {name}: {e:.1e}" for name, e in errors.items() if not e < 1e-11]
    return failures


@pytest.mark.parametrize("parallel", ["sharded", "replicated"])
@pytest.mark.parametrize(("config", "world_size"), list(sampled(CONFIGS, GRIDS)))
def test_equals_one_process(pool, world_size, config, parallel):
    shapes = GRIDS[world_size]
    results = pool(world_size).run(check_grids, shapes, CONFIGS[config], PARALLEL[parallel])
    for failures in results:
        assert not failures, "\n".join(failures)


@pytest.mark.parametrize("parallel", ["heads_over_y", "kept", "recompute", "sequential"])
@pytest.mark.parametrize("config", ["gpt2", "llama"])
def test_ways_to_run(pool, config, parallel):
    shapes = turns(GRIDS[4], list(PARALLEL).index(parallel) + (config == "llama"))
    for failures in pool(4).run(check_grids, shapes, CONFIGS[config], PARALLEL[parallel]):
        assert not failures, "\n".join(failures)


def grids_of_few_heads(config: ModelConfig, options: str) -> list[str]:
    """The failures on grids whose x is a multiple of the number of key-value heads."""
    grids = (GridShape(4), GridShape(2, 2), GridShape(4, 2), GridShape(2, 1, 2, 2))
    failures = []
    for shape in (g for g in grids if g.size == dist.get_world_size() and g.x > config.kv_heads):
        assert not models.check(config, PARALLEL[options], shape, batch_size=BATCH), shape
        errors = run_on_grid(shape, config, PARALLEL[options], torch.float64)
        failures += [f"{shape} {name}: {e:.1e}" for name, e in errors.items() if not e < 1e-11]
    return failures


@pytest.mark.parametrize(
    "options", ["sharded", "replicated", pytest.param("recompute", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("kv_heads", "world_size"),
    [(2, 4), *(pytest.param(1, size, marks=pytest.mark.slow) for size in (4, 8))],
)
@pytest.mark.parametrize("name", ["llama", "qwen3-wide"])
def test_ranks_share_key_value_heads(pool, name, kv_heads, world_size, options):
    # x and z divide the features of 8 heads and of the key-value heads.
    config = dataclasses.replace(CONFIGS[name], num_kv_heads=kv_heads)
    for failures in pool(world_size).run(grids_of_few_heads, config, options):
        assert not failures, "\n".join(failures)


def test_gradient_accumulation_equals_one_batch(pool):
    shape = GridShape(x=2, z=2)
    for errors in pool(4).run(run_on_grid, shape, LLAMA, ParallelConfig(), torch.float64, 2):
        assert max(errors.values()) < 1e-11, errors


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-5), (torch.bfloat16, 0.06)])
def test_lower_precision(pool, dtype, limit):
    """Gradients go through about 30 roundings; the limits allow ten times their error."""
    for errors in pool(4).run(run_on_grid, GridShape(2, 2), LLAMA, ParallelConfig(), dtype):
        assert max(errors.values()) < limit, errors


def move_between_grids(config: ModelConfig) -> None:
    """Loads the state of one grid on another, in one process, and checks the tensors."""
    first, second = grid_of(GridShape(x=2, y=2)), grid_of(GridShape(z=2, data=2))
    state = full_state_dict(models.build(config, first, seed=1))
    other = models.build(config, second, seed=9)
    assert not torch.equal(full_state_dict(other)["lm_head.weight"], state["lm_head.weight"])
    load_full_state_dict(other, state)
    loaded = full_state_dict(other)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    if config.tie_embeddings:
        with pytest.raises(ValueError, match="tie_embeddings=False"):
            load_full_state_dict(other, state | {"lm_head.weight": torch.ones(64, 32)})
        del state["lm_head.weight"]  # as in Hugging Face's files for tied models
        load_full_state_dict(other, state)
    for broken, word in (
        ({k: v for k, v in state.items() if "norm" not in k and "ln_f" not in k}, "missing"),
        (state | {"more": torch.ones(1)}, "more"),
        (state | {"lm_head.bias": torch.ones(1)}, "lm_head.bias"),
        (
            state | {"lm_head.weight": torch.ones(3, 3)},
            r"lm_head.weight must have shape \[64, 32\]",
        ),
        (
            {
                k: v
                for k, v in state.items()
                if "0.attn.c_attn" not in k and "0.self_attn.q" not in k
            },
            "missing.*(0.attn.c_attn|0.self_attn.q_proj)",
        ),
    ):
        with pytest.raises(ValueError, match=word):
            load_full_state_dict(other, broken)


@pytest.mark.parametrize("config", ["gpt2", "llama"])
def test_state_moves_between_grids(pool, config):
    pool(4).run(move_between_grids, CONFIGS[config])


def copy_of_a_model() -> None:
    grid = grid_of(GridShape(x=2))
    model = models.build(LLAMA, grid)
    twin = copy.deepcopy(model)
    ids, _ = random_batch()
    assert twin.grid is grid
    assert torch.equal(model(ids), twin(ids))


def test_models_can_be_copied(pool):
    pool(2).run(copy_of_a_model)


UNEVEN = {
    "heads": dataclasses.replace(GPT2, hidden_size=24, num_heads=3, vocab_size=63),
    "shared heads": dataclasses.replace(LLAMA, hidden_size=24, num_heads=6, num_kv_heads=2),
    "length": dataclasses.replace(GPT2, sequence_length=LENGTH - 1),
}


def illegal_cases(config: ModelConfig) -> int:
    """`check` finds problems exactly if building or running raises; returns the number of these."""
    disagreements, illegal = [], 0
    for shape in factorisations(4):
        for batch in (2, 4):
            for name in ("sharded", "heads_over_y", "replicated"):
                problems = models.check(config, PARALLEL[name], shape, batch_size=batch)
                grid, error = grid_of(shape), ""
                ids = torch.zeros(batch, config.sequence_length, dtype=torch.long)
                try:
                    model = models.build(config, grid, PARALLEL[name])
                    own = grid.shard(ids, {0: ("data", "z")})
                    model.loss(own, own).backward()
                except ValueError as raised:
                    error = str(raised)
                illegal += bool(problems)
                if bool(problems) != bool(error):
                    disagreements.append((shape, batch, name, problems, error))
    assert not disagreements, disagreements
    return illegal


@pytest.mark.parametrize("config", UNEVEN)
def test_check_is_exact(pool, config):
    assert pool(4).run(illegal_cases, UNEVEN[config])[0] > 5


@pytest.mark.parametrize(
    ("heads", "kv_heads", "x", "expected"),
    [
        (14, 2, 4, "num_heads: 14 must be divisible by 4 (x=4): change the grid, or set it to 16"),
        (14, 7, 4, "num_kv_heads: 7 must be divisible by 4 (x=4): change the grid"),
        (12, 3, 4, "num_kv_heads: 3 must be divisible by 4 (x=4): change the grid, or set it to 4"),
    ],
)
def test_the_advice_about_heads_is_legal(heads: int, kv_heads: int, x: int, expected: str) -> None:
    config = ModelConfig(
        64, 16 * heads, 1, heads, 16, family="llama", num_kv_heads=kv_heads, intermediate_size=64
    )
    problems = models.check(config, models.ParallelConfig(), GridShape(x=x), batch_size=8)
    assert [problem for problem in problems if "heads" in problem] == [expected]
    match = re.search(r"num_(kv_)?heads.* or set it to (\d+)$", expected)
    if match is not None:
        name = "num_kv_heads" if match[1] else "num_heads"
        # The products' widths depend on the number of heads.
        better = dataclasses.replace(config, **{name: int(match[2])}, head_size=16)
        problems = models.check(better, models.ParallelConfig(), GridShape(x=x), batch_size=8)
        assert not [problem for problem in problems if "heads" in problem]


def buffer_shapes(config: ModelConfig) -> list[list[int]]:
    return [list(b.shape) for b in models.build(config, grid_of(GridShape())).buffers()]


def test_all_blocks_share_the_rotary_angles(pool):
    (shapes,) = pool(1).run(buffer_shapes, LLAMA)
    assert shapes == [[LLAMA.sequence_length, LLAMA.head_dim]] * 2  # cos and sin


@pytest.mark.parametrize("length", [0, LLAMA.sequence_length + 1])
def test_sequences_of_a_length_that_cannot_be_are_named(length):
    expected = rf"1 <= length <= {LLAMA.sequence_length}, got \[2, {length}\]"
    with pytest.raises(ValueError, match=expected):
        check_token_ids(torch.zeros(2, length, dtype=torch.int64), LLAMA)


def test_num_parameters_and_flops():
    for config in CONFIGS.values():
        model = PlainTransformer(config)
        assert config.num_parameters() == sum(p.numel() for p in model.parameters())
        tokens = BATCH * LENGTH
        with FlopCounterMode(display=False) as counter:
            model.loss(*random_batch()).backward()
        # The counter counts attention as full, not causal, and does not know the CPU's flash
        # kernel; but most operations are in the matrices.
        assert config.flops_per_token() * tokens == pytest.approx(
            counter.get_total_flops(), rel=0.2
        )
