"""Embeddings against plain indexing: rows that start inside a sequence, and invalid ids."""

from __future__ import annotations

import pytest
import torch

from axonn_ext import GridShape, full_state_dict, nn
from grids import grid_of

WIDTH, OFFSET = 8, 2


def position_rows(layout: str, sequences: int, length: int) -> bool:
    """Whether each row has its own position added to it."""
    grid = grid_of(GridShape(4))
    layer = nn.PositionEmbedding(length + 3, WIDTH, grid=grid, offset=OFFSET, layout=layout)
    torch.manual_seed(5)
    whole = torch.randn(sequences * length, WIDTH)
    table = full_state_dict(layer)["weight"]
    want = whole + table[OFFSET : OFFSET + length].repeat(sequences, 1)
    dims = {0: ("x",)} if layout == "sharded" else {}
    return torch.equal(layer(grid.shard(whole, dims), length), grid.shard(want, dims))


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize(("sequences", "length"), [(2, 6), (3, 8), (4, 5), (1, 12)])
def test_rows_that_begin_inside_a_sequence_have_their_positions(
    pool, layout, sequences, length
) -> None:
    assert pool(4).run(position_rows, layout, sequences, length) == [True] * 4


def refused(tokens: list[int]) -> list[str]:
    layer = nn.Embedding(10, WIDTH, grid=grid_of(GridShape(2)), padding=2)
    messages = []
    for token in tokens:
        try:
            layer(torch.tensor([[0, token]]))
            messages.append("taken")
        except (IndexError, ValueError) as error:
            messages.append(str(error))
    return messages


def test_an_id_outside_the_vocabulary_is_refused_also_in_the_padding(pool) -> None:
    tokens = [-1, 10, 11, 12, 1 << 40]
    for messages in pool(2).run(refused, tokens):
        for token, message in zip(tokens, messages, strict=True):
            assert "Embedding: ids" in message and str(token) in message
    assert pool(2).run(refused, [0, 9]) == [["taken", "taken"]] * 2
