"""Extraction on every grid, against running the whole model for each token."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy

from axonn_ext import full_state_dict, models
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.models.plain import PlainTransformer
from axonn_ext.train.memorization.documents import CONTINUED, Document
from axonn_ext.train.memorization.extraction import continuation_loss, extract
from axonn_ext.train.memorization.results import BucketResult, measure
from grids import every_grid
from model_cases import CONFIGS

LENGTH = 80
# Lengths of prompts, one of them twice; data and z do not divide the number of prompts.
SIZES = (9, 1, 30, 17, 9)
TOKENS_AT_ONCE = 150  # gives several batches


def config_of(name: str) -> ModelConfig:
    """Large initial values, so that continuations depend on all tokens, and do not repeat one."""
    return dataclasses.replace(CONFIGS[name], sequence_length=LENGTH, init_std=0.3)


def plain_model(name: str) -> PlainTransformer:
    """The whole model in float64, with the initial weights of every grid."""
    model = models.build(config_of(name), every_grid()[0], seed=3, dtype=torch.float64)
    plain = PlainTransformer(config_of(name)).double()
    plain.load_state_dict(full_state_dict(model))
    return plain


@torch.no_grad()
def references(name: str) -> tuple[list[Document], list[tuple[int, ...]], list[float]]:
    """Documents, the model's continuations of their prompts, and the losses of their ends.

    The model knows the ends of documents with even numbers; in the others, some tokens are changed.
    """
    model, draw = plain_model(name), torch.Generator().manual_seed(1)
    documents, found, losses = [], [], []
    for number, size in enumerate(SIZES):
        prompt = torch.randint(64, (size,), generator=draw).tolist()
        tokens = list(prompt)
        for _ in range(CONTINUED):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        found.append(tuple(tokens[size:]))
        for place in (size + 3, size + 20)[: 2 * (number % 2)]:
            tokens[place] = (tokens[place] + 1) % 64
        documents.append(Document(tuple(tokens), 4 * (number % 2), f"document {number}"))
        logits = model(torch.tensor([tokens[:-1]]))[0, -CONTINUED:]
        losses.append(cross_entropy(logits, torch.tensor(tokens[-CONTINUED:])).item())
    return documents, found, losses


def on_grids(
    name: str, documents: list[Document]
) -> list[tuple[str, list[tuple[int, ...]], float, int]]:
    results = []
    for number, grid in enumerate(every_grid()):
        parallel = ParallelConfig(layout=("sharded", "replicated")[number % 2])
        model = models.build(config_of(name), grid, parallel, seed=3, dtype=torch.float64)
        done: list[int] = []
        found = extract(model, documents, tokens_at_once=TOKENS_AT_ONCE, advance=done.append)
        assert len(done) > 1 or grid.num_parts(("data", "z")) > 1
        loss = continuation_loss(model, documents, tokens_at_once=TOKENS_AT_ONCE)
        results.append((str(grid.shape), [each.found for each in found], loss, sum(done)))
    return results


FOUR = [
    pytest.param("llama", 4, marks=pytest.mark.slow),
    pytest.param("gpt2", 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "world_size"), [("gpt2", 1), ("qwen3-wide", 2), *FOUR])
def test_every_grid_extracts_what_the_whole_model_says(name, world_size, pool) -> None:
    documents, want, losses = pool(1).run(references, name)[0]
    assert len(set(want)) == len(want)
    mean = sum(losses) / len(losses)
    for rank in pool(world_size).run(on_grids, name, documents):
        for shape, tokens, loss, done in rank:
            assert tokens == want, shape
            assert done == len(documents)
            # The losses of a batch are summed in fp32: about 200 terms, each rounded to 6e-8.
            assert loss == pytest.approx(mean, rel=2e-6), shape


def measured(name: str, documents: list[Document]) -> list[BucketResult]:
    model = models.build(config_of(name), every_grid()[0], seed=3, dtype=torch.float64)
    return measure(model, documents)


def test_a_row_for_each_bucket(pool) -> None:
    documents, _, losses = pool(1).run(references, "llama")[0]
    known, changed = pool(1).run(measured, "llama", documents)[0]
    assert (known.repetitions, known.documents, known.matches) == (0, 3, 3)
    assert (known.edit_distance, known.longest_run) == (0, CONTINUED)
    assert (changed.repetitions, changed.documents, changed.matches) == (4, 2, 0)
    assert 1 <= changed.edit_distance <= 2
    assert 29 <= changed.longest_run < CONTINUED  # the tokens after the second change
    assert known.loss == pytest.approx(sum(losses[::2]) / 3, rel=2e-6)
    assert changed.loss == pytest.approx(sum(losses[1::2]) / 2, rel=2e-6)


def refused(tokens: list[int]) -> str:
    model = models.build(config_of("llama"), every_grid()[0], seed=3)
    documents = [Document(tuple(tokens), 1, "line 7")] if tokens else []
    with pytest.raises(ValueError, match=r"\S") as error:
        extract(model, documents)
    return str(error.value)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1] * CONTINUED, "line 7: expected more than 50 and at most 80 tokens, which the model"),
        ([1] * 81, "at most 80 tokens, which the model takes, got 81"),
        ([1] * 60 + [64], "line 7: token ids must be in [0, 64), got 1 to 64"),
        ([], "documents: expected at least one, got none"),
    ],
)
def test_documents_that_do_not_fit_the_model(tokens, message, pool) -> None:
    assert message in pool(2).run(refused, tokens)[1]
