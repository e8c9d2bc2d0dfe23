"""The probabilities of given tokens on every grid, against those of the whole model."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from axonn_ext import full_state_dict, models
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.models.generation import Score, score, windows
from axonn_ext.models.plain import PlainTransformer
from grids import every_grid
from model_cases import CONFIGS, sampled

LENGTH = 24
# Lengths of sequences, one more than the model's, and how many of their tokens are scored; data and
# z do not divide the number of sequences.
CASES = ((9, 3), (LENGTH + 1, LENGTH), (5, 2), (17, 4), (2, 1), (9, 8))
TOKENS_AT_ONCE = 60  # gives batches of sequences of several lengths


def config_of(name: str) -> ModelConfig:
    """Large initial values, so that probabilities depend on all tokens."""
    return dataclasses.replace(CONFIGS[name], sequence_length=LENGTH, init_std=0.3)


def sequences() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(64, (length,), generator=draw).tolist() for length, _ in CASES]


@torch.no_grad()
def whole(name: str, asked: list[list[int]]) -> tuple[list[list[int]], list[Score]]:
    """The sequences, every other one with the likeliest tokens at its end, and their scores."""
    model = PlainTransformer(config_of(name)).double()
    grid = every_grid()[0]
    model.load_state_dict(
        full_state_dict(models.build(config_of(name), grid, seed=3, dtype=torch.float64))
    )
    found = []
    for number, (sequence, (_, count)) in enumerate(zip(asked, CASES, strict=True)):
        for place in range(len(sequence) - count, len(sequence)) if number % 2 else ():
            logits = model(torch.tensor([sequence[:place]]))[0, -1]
            sequence[place] = int(logits.argmax())
        logits = model(torch.tensor([sequence[:-1]]))[0, -count:].log_softmax(-1)
        labels = torch.tensor(sequence[-count:])
        total = logits.gather(1, labels[:, None]).sum().item()
        found.append(Score(total, bool((logits.argmax(-1) == labels).all())))
    return asked, found


def on_grids(name: str, asked: list[list[int]]) -> list[tuple[str, list[Score], list[int]]]:
    results = []
    for number, grid in enumerate(every_grid()):
        parallel = ParallelConfig(layout=("sharded", "replicated")[number % 2])
        model = models.build(config_of(name), grid, parallel, seed=3, dtype=torch.float64)
        done: list[int] = []
        found = score(
            model, asked, [count for _, count in CASES], tokens_at_once=TOKENS_AT_ONCE,
            advance=done.append,
        )  # fmt: skip
        results.append((str(grid.shape), found, done))
    return results


@pytest.mark.parametrize(
    ("name", "world_size"),
    sampled(("gpt2", "gpt2-odd", "llama-long", "gemma2", "olmo2"), (1, 2, 4)),
)
def test_every_grid_scores_what_the_whole_model_does(name, world_size, pool) -> None:
    asked, want = pool(1).run(whole, name, sequences())[0]
    assert {each.is_greedy for each in want} == {False, True}
    for rank in pool(world_size).run(on_grids, name, asked):
        for shape, found, done in rank:
            assert sum(done) == len(CASES)
            for one, other in zip(found, want, strict=True):
                # At most 24 terms in fp64, as for losses (test_models.py).
                assert one.log_probability == pytest.approx(other.log_probability, rel=1e-11), shape
                assert one.is_greedy == other.is_greedy, shape


def refused(asked: list[list[int]], count: int) -> str:
    model = models.build(config_of("llama"), every_grid()[0], seed=3)
    with pytest.raises(ValueError, match="score: ") as error:
        score(model, asked, [1, count])
    return str(error.value)


@pytest.mark.parametrize(
    ("tokens", "count", "message"),
    [
        ([1] * (LENGTH + 2), 1, "expected at most 25 tokens, .*, got 26, 1 of them scored"),
        ([1, 2], 2, "the first is not scored, got 2, 2 of them scored"),
        ([1, 2], 0, "got 2, 0 of them scored"),
        ([1, 64], 1, r"token ids must be in \[0, 64\), got 1 to 64"),
    ],
)
def test_bad_sequences_are_named(tokens, count, message, pool) -> None:
    found = pool(1).run(refused, [[1, 2, 3], tokens], count)[0]
    assert re.search(f"^score: sequence 1: .*{message}", found), found


@pytest.mark.parametrize("size", [0, 1, 4, 5, 9, 12])
@pytest.mark.parametrize("prefix", [None, 99])
def test_windows_score_each_token_once(size: int, prefix: int | None) -> None:
    parts = list(windows(range(size), 4, prefix))
    scored = [token for sequence, count in parts for token in sequence[-count:]]
    assert scored == list(range(prefix is None, size))
    for sequence, count in parts[1:]:
        assert len(sequence) == 5 and count <= 4, "as much context as fits"
    if parts and prefix is not None:
        assert parts[0][0][0] == prefix
