"""Attention with a window or capped scores, against one softmax over all scores."""

from __future__ import annotations

import pytest
import torch

from axonn_ext.nn import windows
from axonn_ext.nn.windows import attend

HEADS, SIZE = 4, 8


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 3 rows, so that windows are longer, as long and shorter than a piece."""
    monkeypatch.setattr(windows, "ATTENTION_ROWS", 3)


def inputs(length: int, kv_heads: int) -> list[torch.Tensor]:
    torch.manual_seed(length)
    shapes = ((2, heads, length, SIZE) for heads in (HEADS, kv_heads, kv_heads))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def want(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float,
    softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("bhsd,bhtd->bhst", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    shares = torch.where(seen, scores, -torch.inf).softmax(-1)
    return torch.einsum("bhst,bhtd->bhsd", shares, v)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 16, 17])
@pytest.mark.parametrize("length", [1, 16, 23])
def test_a_token_attends_to_the_window_that_ends_with_it(length, window, kv_heads, softcap) -> None:
    q, k, v = inputs(length, kv_heads)
    places = torch.arange(length)
    seen = (places <= places[:, None]) & (places > places[:, None] - (window or length))
    got = attend(q, k, v, None, scale=0.4, window=window, softcap=softcap)
    expected = want(q, k, v, seen, 0.4, softcap)
    grad = torch.randn_like(got)
    # Sums of at most 23 terms in fp64.
    assert torch.allclose(got, expected, rtol=0, atol=1e-13)
    for mine, theirs in zip(
        torch.autograd.grad(got, (q, k, v), grad),
        torch.autograd.grad(expected, (q, k, v), grad),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_a_mask_decides_what_is_seen(softcap) -> None:
    q, k, v = inputs(9, 2)
    seen = torch.rand(2, 1, 9, 9) < 0.5
    seen[..., 0] = True
    got = attend(q, k, v, seen, scale=None, window=2, softcap=softcap)
    expected = want(q, k, v, seen, SIZE**-0.5, softcap)
    assert torch.allclose(got, expected, rtol=0, atol=1e-13)


def test_capped_scores_are_in_memory_for_a_piece_of_the_sequence_only() -> None:
    """A sequence of two pieces keeps nothing of the size of its scores for backward."""
    q, k, v = inputs(1024, 1)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        attend(q, k, v, None, scale=None, window=None, softcap=1.0)
    assert max(t.untyped_storage().nbytes() for t in kept) <= q.nbytes
