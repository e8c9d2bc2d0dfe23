"""Vocabularies that a grid does not divide: they get rows of zeros, which are never visible."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from axonn_ext import (
    GridShape,
    checkpoint,
    from_pretrained,
    full_gradients,
    full_state_dict,
    models,
    save_pretrained,
    sync_gradients,
)
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.nn.sharded import sharded_parameters
from axonn_ext.optim import AdamW
from axonn_ext.spec.vocabulary import padded_vocab_size
from checkpoint_cases import Setup, load_and_go_on, train_and_save
from grids import grid_of
from model_cases import CONFIGS, random_batch

ODD = {name: CONFIGS[name] for name in ("gpt2-odd", "llama-odd")}
LOSSES = 2e-4  # as in checkpoint/test_checkpoint.py: fp32 sums in a different order, five steps


@pytest.mark.parametrize(
    ("vocab_size", "grid", "rows"),
    [
        (50257, GridShape(), 50257), (50257, GridShape(y=4, data=8), 50257),
        (50257, GridShape(x=2), 50432), (50257, GridShape(x=4, z=2), 51200),
        (50257, GridShape(z=3), 50304), (51200, GridShape(x=4, z=16), 51200),
        (1, GridShape(x=2), 256),
    ],
)  # fmt: skip
def test_rows_are_megatrons(vocab_size: int, grid: GridShape, rows: int) -> None:
    assert padded_vocab_size(vocab_size, grid) == rows


def state_on(shape: GridShape, config: ModelConfig) -> dict[str, torch.Tensor]:
    return full_state_dict(models.build(config, grid_of(shape), seed=4))


@pytest.mark.parametrize("name", ODD)
def test_initial_values_are_those_of_one_rank(pool, name: str) -> None:
    want = pool(1).run(state_on, GridShape(), ODD[name])[0]
    for shape in (GridShape(2, 2), GridShape(2, 1, 2), GridShape(1, 1, 4)):
        for got in pool(4).run(state_on, shape, ODD[name]):
            assert got.keys() == want.keys()
            assert all(torch.equal(got[key], want[key]) for key in want), shape


def save(folder: Path, config: ModelConfig) -> None:
    save_pretrained(models.build(config, grid_of(GridShape()), seed=4), folder)


def padding_of(folder: Path, shape: GridShape) -> list[bool]:
    """For each padded parameter, whether its padding is zero. New memory is filled with nan."""
    torch.use_deterministic_algorithms(True)
    try:
        model = from_pretrained(folder, grid_of(shape))
    finally:
        torch.use_deterministic_algorithms(False)
    padded = [p for p in sharded_parameters(model) if p.spec.padding]
    return [not p.parameter[p.own_rows() :].count_nonzero() for p in padded]


@pytest.mark.parametrize("name", ODD)
def test_padding_of_a_loaded_model_is_zero(pool, name: str, tmp_path: Path) -> None:
    pool(1).run(save, tmp_path / "model", ODD[name])
    for found in pool(4).run(padding_of, tmp_path / "model", GridShape(2, 2)):
        assert found and all(found)


def train(shape: GridShape, config: ModelConfig, dtype: torch.dtype, kind: str) -> list[str]:
    """Problems of the padding after a few training steps."""
    grid, problems = grid_of(shape), []
    model = models.build(config, grid, ParallelConfig(), seed=2, dtype=dtype)
    zero = 1 if kind == "zero" else 0
    optimizer = AdamW(model, lr=0.1, weight_decay=0.1, zero=zero)
    ids, labels = (grid.shard(t, {0: ("data", "z")}) for t in random_batch())
    rows = padded_vocab_size(config.vocab_size, shape)
    assert rows > config.vocab_size, "nothing is padded"
    for _ in range(3):
        loss = model.loss(ids, labels)
        loss.backward()
        sync_gradients(model)
        for name, gradient in full_gradients(model).items():
            if gradient.shape[0] == rows:
                problems.append(f"{name}: a gradient of {rows} rows")
        optimizer.step()
        optimizer.zero_grad()
    for p in sharded_parameters(model):
        behind = p.parameter[p.own_rows() :]
        if p.spec.padding and behind.count_nonzero():
            problems.append(f"{p.name}: padding is not zero")
    logits = grid.unshard(model(ids), {1: ("x",)})
    if logits.shape[1] != rows or not logits[:, : config.vocab_size].isfinite().all():
        problems.append(f"logits of shape {list(logits.shape)}")
    if logits.argmax(1).max() >= config.vocab_size:
        problems.append("a token of the padding is the likeliest")
    share = torch.softmax(logits.float(), 1)[:, config.vocab_size :].sum().item()
    if share != 0:
        problems.append(f"the padding has a probability of {share}")
    return problems


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [("gpt2-odd", GridShape(2, 2), ""), ("llama-odd", GridShape(2, 1, 2), ""),
     ("gpt2-odd", GridShape(1, 1, 2, 2), "zero"), ("llama-odd", GridShape(4), "")],
)  # fmt: skip
def test_padding_stays_zero_and_never_wins(pool, name, shape, kind, dtype) -> None:
    for problems in pool(4).run(train, shape, ODD[name], dtype, kind):
        assert not problems, problems


PAIRS = [
    (Setup(GridShape(2, 2)), Setup(GridShape(1, 1, 2), "replicated")),
    (Setup(GridShape(1, 1, 4)), Setup(GridShape())),
    (Setup(GridShape()), Setup(GridShape(4))),
    (Setup(GridShape(2, 1, 2), dtype=torch.bfloat16),
     Setup(GridShape(2, 1, 2), dtype=torch.bfloat16)),
]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} to {pair[1]}")
@pytest.mark.parametrize("name", ODD)
def test_checkpoints_move_between_grids(pool, tmp_path: Path, name: str, pair) -> None:
    written, read = (dataclasses.replace(setup, config=ODD[name]) for setup in pair)
    want = pool(written.shape.size).run(train_and_save, written, tmp_path / "step")[0]
    for got in pool(read.shape.size).run(load_and_go_on, read, tmp_path / "step"):
        assert got["digests"] == want["digests"]
        if written == read:
            assert got["losses"] == want["losses"]
        else:
            assert got["losses"] == pytest.approx(want["losses"], rel=LOSSES)


def save_or_load(folder: Path, shape: GridShape, optimizer: str, saves: bool) -> dict:
    """The state of a job that has trained and saved, or has loaded what another saved."""
    grid = grid_of(shape)
    model = models.build(ODD["llama-odd"], grid, seed=5 if saves else 6)
    if optimizer == "torch":
        updates: AdamW | torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:  # with buckets that split rows
        updates = AdamW(model, lr=0.01, zero=1, bucket_elements=1000)
    ids, labels = (grid.shard(t, {0: ("data", "z")}) for t in random_batch())
    if saves:
        model.loss(ids, labels).backward()
        sync_gradients(model)
        updates.step()
        updates.zero_grad()
        checkpoint.save(folder, model=model, optimizer=updates)
    else:
        checkpoint.load(folder, model=model, optimizer=updates)
    loss = model.loss(ids, labels)
    loss.backward()
    sync_gradients(model)
    updates.step()
    return {"loss": loss.item(), **full_state_dict(model)}


@pytest.mark.parametrize("optimizer", ["torch", "zero"])
def test_checkpoints_of_other_optimizers(pool, tmp_path: Path, optimizer: str) -> None:
    folder = tmp_path / "step"
    want = pool(4).run(save_or_load, folder, GridShape(2, 1, 1, 2), optimizer, True)[0]
    for shape in (GridShape(2, 1, 1, 2), GridShape(1, 1, 2, 2), GridShape(4)):
        for got in pool(4).run(save_or_load, folder, shape, optimizer, False):
            for key, value in want.items():
                # One step of AdamW after the checkpoint, with sums in a different order.
                torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-4)
