"""auto_parallelize on unmodified transformers models: logits, loss, gradients, plain modules."""

from __future__ import annotations

import pytest
import torch

from axonn_ext import GridShape, auto_parallelize
from grids import factorisations, grid_of
from transformers_cases import MODELS, compared, make

pytestmark = pytest.mark.slow

GRIDS = {
    1: [GridShape()],
    2: factorisations(2),
    4: factorisations(4),
    8: [GridShape(2, 2, 2), GridShape(4, 2), GridShape(2, 1, 2, 2)],
}


def placed(name: str, shape: GridShape) -> tuple[dict[str, float], str]:
    """Relative errors on this rank, and the summary."""
    grid = grid_of(shape)
    plain = make(name)
    with auto_parallelize(grid) as block:
        model = make(name)
    return compared(name, model, plain, grid, ("data", "z", "y", "x")), block.summary()


PLAIN = {
    "llama": ["whole  model.embed_tokens (Embedding"],
    "mistral": ["whole  model.embed_tokens (Embedding"],
    "qwen2": ["plain  lm_head (Linear 64 -> 256): its weight is also model.embed_tokens.weight"],
    "qwen3": ["whole  model.layers.0.self_attn.q_norm (Qwen3RMSNorm"],
    "gpt2": ["plain  lm_head (Linear 64 -> 256): its weight is also transformer.wte.weight",
             "whole  transformer.h.0.attn.c_attn (Conv1D"],
    "opt": ["plain  lm_head (Linear 64 -> 256): its weight is also model.decoder.embed_tokens"],
    "bert": ["plain  cls.predictions.decoder (Linear 64 -> 256): its weight is also bert.emb"],
    "bert-classifier": ["whole  bert.embeddings.LayerNorm"],
}  # fmt: skip
LINEARS = {
    "llama": 15, "mistral": 15, "qwen2": 14, "qwen3": 15, "gpt2": 0, "opt": 12, "bert": 13,
    "bert-classifier": 13,
}  # fmt: skip


@pytest.mark.parametrize("world_size", GRIDS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name, world_size, pool) -> None:
    for shape in GRIDS[world_size]:
        for errors, summary in pool(world_size).run(placed, name, shape):
            # Both compute in fp32, with sums in different orders. 96 terms of a sum lose a few
            # units of 6e-8 each, and gradients pass through the layers twice.
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
