"""Causal attention with a window or capped scores, in pieces of the sequence.

B sequences of S tokens, D features of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as _scaled_dot_product
from torch.utils.checkpoint import checkpoint

from axonn_ext.spec.rules import ATTENTION_ROWS


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Returns the result of attention, [B, heads, S, D].

    q: [B, heads, S, D]. k, v: [B, kv heads, T, D]. mask: [B, 1, S, T], whether a token attends to
    another, which respects the window; None: causal whole sequences, T = S.
    window: a token attends to that many tokens, itself included. softcap: c, where scores s become
    c tanh(s / c), computed in fp32 (fp64 for fp64).

    Without a mask, the rows after the first window are computed in pieces, against the keys that
    they can reach. All pieces share a mask of at most ATTENTION_ROWS rows. Scores with a softcap
    are in memory for a piece at a time, and are computed again in backward. Source of the softcap:
    Gemma Team, arXiv:2408.00118, section 2.
    """
    length = q.shape[-2]
    if softcap is not None:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return _attend_capped(q, k, v, mask, scale, window or length, softcap)
    grouped = k.shape[1] < q.shape[1]
    if mask is None and (window is None or window >= length):
        return _scaled_dot_product(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    if grouped and length > 1:
        # No fused GPU kernel supports both a mask and grouped heads.
        k, v = _repeated(k, q), _repeated(v, q)
    if mask is not None:
        grouped = k.shape[1] < q.shape[1]
        return _scaled_dot_product(q, k, v, mask, scale=scale, enable_gqa=grouped)
    assert window is not None
    first_q, first_k, first_v = (t[..., :window, :] for t in (q, k, v))
    pieces = [_scaled_dot_product(first_q, first_k, first_v, is_causal=True, scale=scale)]
    # Row r of a later piece can reach `window` keys, from the r-th of those that the piece reaches.
    count = min(window, ATTENTION_ROWS)
    rows = torch.arange(count, device=q.device)[:, None]
    # One key more than there are, so that the stride of rows is a multiple of 8 for usual windows:
    # for others, PyTorch copies the mask on GPUs (pad_bias of its memory-efficient attention).
    keys = torch.arange(window + count, device=q.device)
    near = (keys >= rows) & (keys < rows + window)
    # In this form the pieces share it; torch would make a copy of a bool mask for each.
    added = torch.zeros(near.shape, dtype=q.dtype, device=q.device).masked_fill_(~near, -torch.inf)
    for start in range(window, length, count):
        end = min(start + count, length)
        near_k, near_v = (t[..., start - window + 1 : end, :] for t in (k, v))
        own = added[: end - start, : end - start + window - 1]
        piece = _scaled_dot_product(q[..., start:end, :], near_k, near_v, own, scale=scale)
        pieces.append(piece)
    return torch.cat(pieces, -2)


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Returns keys or values once for each head of q."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _attend_capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, window: int, softcap: float
) -> Tensor:
    """Returns `attend` with a softcap; window: S or more means that there is none."""
    length, total = q.shape[-2], k.shape[-2]
    pieces = []
    rows = min(window, ATTENTION_ROWS)
    for start in range(0, length, rows):
        end = min(start + rows, length)
        first, last = (max(start - window + 1, 0), end) if mask is None else (0, total)
        parts = q[..., start:end, :], k[..., first:last, :], v[..., first:last, :]
        seen = None if mask is None else mask[..., start:end, :]
        arguments = (*parts, seen, start - first, scale, window, softcap)
        if torch.is_grad_enabled():
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            pieces.append(checkpoint(_capped, *arguments, **options))
        else:
            pieces.append(_capped(*arguments))
    return torch.cat(pieces, -2)


def _capped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    offset: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """offset: the place of the first query among the keys, if there is no mask."""
    if mask is None:
        queries = torch.arange(offset, offset + q.shape[-2], device=q.device)[:, None]
        keys = torch.arange(k.shape[-2], device=q.device)
        mask = (keys <= queries) & (keys > queries - window)
    scores = q @ _repeated(k, q).transpose(-1, -2)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    scores = torch.tanh(scores * (scale / softcap)) * softcap
    shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return shares.to(v.dtype) @ _repeated(v, q)
