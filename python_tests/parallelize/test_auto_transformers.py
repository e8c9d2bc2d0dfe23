"""auto_parallelize on unmodified models of transformers: logits, loss, gradients, what is plain."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from axonn_ext import GridShape, auto_parallelize, full_gradients, global_mean, sync_gradients
from grids import factorisations, grid_of, relative_error
from transformers_cases import MODELS, batch, loss_sum, make, relative_errors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GRIDS = {
    1: [GridShape()],
    2: factorisations(2),
    4: factorisations(4),
    8: [GridShape(2, 2, 2), GridShape(4, 2), GridShape(2, 1, 2, 2)],
}


def compared(name: str, shape: GridShape) -> tuple[dict[str, float], str]:
    """Relative errors on this rank, and the summary."""
    grid = grid_of(shape)
    plain = make(name)
    with auto_parallelize(grid) as block:
        model = make(name)
    ids, labels = batch(name)
    logits = plain(ids).logits
    want_loss = loss_sum(name, logits, labels) / (labels != -100).sum()
    want_loss.backward()
    want = {n: p.grad for n, p in plain.named_parameters()}

    own = {0: ("data", "z", "y", "x")}
    own_labels = grid.shard(labels, own)
    found_logits = model(grid.shard(ids, own)).logits
    total = loss_sum(name, found_logits, own_labels)
    loss = global_mean(total, (own_labels != -100).sum(), grid, axes=("x", "y", "z", "data"))
    loss.backward()
    sync_gradients(model)
    found = full_gradients(model)
    assert found.keys() == want.keys()
    errors = relative_errors(found, want)
    errors["logits"] = relative_error(found_logits, grid.shard(logits, own))
    errors["loss"] = relative_error(loss, want_loss)
    assert isinstance(model, nn.Module) and type(model) is type(plain)
    return errors, block.summary()


PLAIN = {
    "llama": ["whole  model.embed_tokens (Embedding"],
    "gpt2": ["plain  lm_head (Linear 64 -> 256): its weight is also transformer.wte.weight",
             "whole  transformer.h.0.attn.c_attn (Conv1D"],
    "opt": ["plain  lm_head (Linear 64 -> 256): its weight is also model.decoder.embed_tokens"],
    "bert": ["plain  cls.predictions.decoder (Linear 64 -> 256): its weight is also bert.emb"],
    "bert-classifier": ["whole  bert.embeddings.LayerNorm"],
}  # fmt: skip
LINEARS = {"llama": 15, "gpt2": 0, "opt": 12, "bert": 13, "bert-classifier": 13}


@pytest.mark.parametrize("world_size", GRIDS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name, world_size, pool) -> None:
    for shape in GRIDS[world_size]:
        for errors, summary in pool(world_size).run(compared, name, shape):
            # Both compute in fp32 and add up in other orders; 96 terms of a sum lose a few units
            # of 6e-8 each, and gradients pass through the layers twice.
            assert max(errors.values()) < 2e-5, (shape, errors)
            assert all(text in summary for text in PLAIN[name]), summary
            classes = name == "bert-classifier" and shape.x * shape.z == 1
            assert f"{LINEARS[name] + classes} of" in summary.splitlines()[0], summary


def test_the_block_leaves_no_trace_in_transformers(pool) -> None:
    pool(2).run(plain_afterwards)


def plain_afterwards() -> None:
    with auto_parallelize(grid_of(GridShape(x=2))):
        model = make("llama")
    assert type(model.lm_head).__name__ == "RowLinear"
    assert type(make("llama").lm_head) is torch.nn.Linear
