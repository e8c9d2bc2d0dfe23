"""Sequences of several documents: each document must be computed as if it were alone."""

from __future__ import annotations

import pytest
import torch

from axonn_ext import full_gradients, full_state_dict, models, sync_gradients
from axonn_ext.models import ParallelConfig
from axonn_ext.models.plain import PlainTransformer
from axonn_ext.nn import Places
from grids import every_grid, turns
from model_cases import CONFIGS, random_batch

LENGTHS = ((8,), (3, 5), (1, 1, 6), (4, 4), (7, 1), (2, 2, 2, 2), (5, 3), (6, 2))
PARALLEL = {
    "sharded": ParallelConfig(),
    "heads_over_y": ParallelConfig(heads_over_y=True),
    "replicated": ParallelConfig(layout="replicated"),
    "recompute": ParallelConfig(recompute="full"),
    "recompute attention": ParallelConfig(recompute="attention"),
}


def numbered() -> torch.Tensor:
    """The document number of each token."""
    rows = [[i for i, length in enumerate(row) for _ in range(length)] for row in LENGTHS]
    return torch.tensor(rows)


def errors_on_grids(name: str, options: str) -> list[tuple[str, float]]:
    found = []
    grids = every_grid()
    if "recompute" in options:  # the two policies take turns
        grids = turns(grids, list(PARALLEL).index(options))
    for grid in grids:
        parallel = PARALLEL[options]
        model = models.build(CONFIGS[name], grid, parallel, seed=2, dtype=torch.float64)
        plain = PlainTransformer(CONFIGS[name]).double()
        plain.load_state_dict(full_state_dict(model))
        ids, labels = random_batch()
        count = float((labels != -100).sum())
        want = torch.zeros((), dtype=torch.float64)
        for row, lengths in enumerate(LENGTHS):
            pieces = zip(ids[row].split(lengths), labels[row].split(lengths), strict=True)
            for tokens, targets in pieces:
                want = want + plain.loss(tokens[None], targets[None], count)
        want.backward()
        own = {0: ("data", "z")}
        places = Places.packed(grid.shard(numbered(), own))
        loss = model.loss(grid.shard(ids, own), grid.shard(labels, own), places=places)
        loss.backward()
        sync_gradients(model)
        grads = {n: p.grad for n, p in plain.named_parameters(remove_duplicate=False)}
        got = full_gradients(model) | {"loss": loss.detach()}
        all_want = grads | {"loss": want.detach()}
        scale = {n: all_want[n.replace("k_proj.bias", "q_proj.bias")] for n in all_want}
        error = max(((got[n] - all_want[n]).norm() / scale[n].norm()).item() for n in all_want)
        found.append((str(grid.shape), error))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", "sharded"),
        ("llama", "heads_over_y"),
        ("qwen3", "replicated"),
        ("llama", "recompute"),
        ("qwen3", "recompute attention"),
        ("gemma2", "sharded"),
        ("cohere2", "replicated"),
    ],
)
def test_no_document_sees_another(name, options, world_size, pool) -> None:
    for found in pool(world_size).run(errors_on_grids, name, options):
        for shape, error in found:
            # fp64 sums of at most 64 terms in different orders.
            assert error < 1e-12, shape


def test_positions_begin_anew_in_each_document() -> None:
    places = Places.packed(torch.tensor([[4, 4, 4, 7, 7, 4], [0, 1, 2, 2, 2, 2]]))
    assert places.positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]
    assert places.mask is not None
    assert places.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
