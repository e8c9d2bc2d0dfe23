"""Causal self-attention; each rank has whole sequences and whole key-value head groups."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from axonn_ext.nn.linear import Linear
from axonn_ext.nn.norm import AllHeadsNorm, HeadNorm
from axonn_ext.nn.rotary import Rotary
from axonn_ext.nn.sequences import KeyValueCache, Places
from axonn_ext.nn.sharded import Init, own_rows
from axonn_ext.nn.windows import attend
from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.parallel import check_choice
from axonn_ext.spec.rules import ranks_of_a_kv_head

QK_NORMS = ("", "head", "all")


class Attention(nn.Module):
    """Grouped-query causal attention between a fused qkv Linear and an out-projection.

    x [m / Gx, H / Gy] -> same   (replicated: [m, H / Gy]); rows are the flattened batch.

    The rows of the qkv weight are grouped by key-value head, [q.., k, v] for each, so that a block
    of rows holds whole groups. Between the two Linears, each rank computes attention for whole
    sequences, which are split as follows:

        sharded                sequences over (data, z, y), heads over x
        sharded, heads_over_y  sequences over (data, z), heads over x and y. This works even if y
                               does not divide the sequences. Its collectives move features instead
                               of rows, and the same number of bytes
        replicated             sequences over (data, z), heads over x; all y ranks compute the same

    If x is a multiple of the key-value heads, x / heads ranks share one: they gather its qkv
    features, and each attends with its own queries. No weight is held twice. This takes one more
    all-gather, and a reduce-scatter in backward.

    scale: the factor of the scores; default 1 / sqrt(head_dim). window, softcap: see
    windows.attend.

    qk_norm: RMSNorms with norm_eps normalise queries and keys before they are rotated (q_norm,
    k_norm): "head" over the features of each head, as in Qwen3, "all" over those of all heads, as
    in OLMo 2. bias: of qkv and, unless out_bias is given, of the out-projection.

    recompute: recomputes everything between the two Linears in backward: norms of queries and keys,
    their rotation and the scaled dot products. Autograd then keeps only the result of qkv and the
    input of the out-projection. Of the collectives, only those of norms of all heads are repeated:
    exchanges of heads belong to the Linears, and features of shared key-value heads are kept
    gathered.

    places: the positions of the tokens and what they attend to, for all sequences of the (data, z)
    group; default each sequence from position 0, causally. cache: stores keys and values, and
    provides those of earlier tokens (layout "replicated" only; requires `places`). held: the
    weights of qkv and out, as Linear takes them.

    Raises ValueError if neither the axes divide the key-value heads nor these x, or if the axes do
    not divide the sequences.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        grid: Grid,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rotary: Rotary | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        qk_norm: str = "",
        norm_eps: float = 1e-6,
        norm_plus_one: bool = False,
        bias: bool = True,
        out_bias: bool | None = None,
        layout: str = "sharded",
        heads_over_y: bool = False,
        init: Init | None = None,
        out_init: Init | None = None,
        save_gathered: bool = False,
        reshard_after_forward: bool = True,
        algorithm: str = "auto",
        recompute: bool = False,
        seed: int | None = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.splits_sequences = layout == "sharded" and not heads_over_y  # over y
        if num_heads % self.num_kv_heads:
            raise ValueError(
                f"Attention: num_heads={num_heads} must be divisible by "
                f"num_kv_heads={self.num_kv_heads}"
            )
        self.head_dim = head_dim or hidden_size // num_heads
        self.rotary, self.scale, self.window, self.softcap = rotary, scale, window, softcap
        head_axes = ("x", "y") if heads_over_y else ("x",)
        parts = grid.num_parts(head_axes)
        shared = ranks_of_a_kv_head(num_heads, self.num_kv_heads, parts)
        may_share = not heads_over_y and qk_norm != "all"
        if not shared or (shared > 1 and not may_share):
            splits_heads = parts % self.num_kv_heads == 0 and may_share
            name = "num_heads" if splits_heads else "num_kv_heads"
            raise ValueError(
                f"Attention: {name}={getattr(self, name)} must be divisible by {parts} "
                f"(axes {', '.join(f'{a}={grid.size(a)}' for a in head_axes)})"
            )
        self._sharing = grid.neighbours("x", shared) if shared > 1 else None
        self._algorithm = algorithm
        heads = num_heads + 2 * self.num_kv_heads
        moved_dim = int(heads_over_y)
        linear = partial(
            Linear, grid=grid, layout=layout, save_gathered=save_gathered,
            reshard_after_forward=reshard_after_forward, algorithm=algorithm, seed=seed,
            dtype=dtype, device=device,
        )  # fmt: skip
        self.qkv = linear(
            hidden_size, heads * self.head_dim, role="expand", scatter_dim=moved_dim, init=init,
            bias=bias, name="qkv",
        )  # fmt: skip
        self.out = linear(
            num_heads * self.head_dim, hidden_size, role="contract", gather_dim=moved_dim,
            init=out_init or init, bias=bias if out_bias is None else out_bias, name="out",
        )  # fmt: skip
        check_choice("qk_norm", qk_norm, QK_NORMS)
        self._qk_norm = qk_norm
        self.q_norm, self.k_norm = (
            _qk_norm(
                qk_norm, count, self.head_dim, heads_over_y, norm_plus_one, algorithm, grid=grid,
                eps=norm_eps, layout=layout, seed=seed, dtype=dtype, device=device,
            )
            for count in (num_heads, self.num_kv_heads)
        )  # fmt: skip

    def forward(
        self,
        x: Tensor,
        sequence_length: int,
        places: Places | None = None,
        cache: KeyValueCache | None = None,
        held: Sequence[Tensor | None] = (None, None),
    ) -> Tensor:
        qkv = self.qkv(x, held=held[0])  # [sequences * length, groups * (q_per_kv + 2) * head_dim]
        if qkv.shape[0] % sequence_length:
            raise ValueError(
                f"Attention: the {qkv.shape[0]} rows that each y rank attends over must be whole "
                f"sequences of {sequence_length}; let y={self.qkv.grid.size('y')} divide the "
                "sequences of a (data, z) group, or use heads_over_y or layout 'replicated'"
            )
        if self._sharing is not None:
            qkv = self._own_heads(self._gather(qkv))
        if self.recompute and cache is None and torch.is_grad_enabled():
            # It draws no random numbers, so no generator state must be kept.
            out = checkpoint(
                self._attend, qkv, sequence_length, places, use_reentrant=False,
                preserve_rng_state=False,
            )  # fmt: skip
        else:
            out = self._attend(qkv, sequence_length, places, cache)
        return self.out(out, held=held[1])

    def _attend(
        self,
        qkv: Tensor,
        sequence_length: int,
        places: Places | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Returns the attention output of this rank's heads, [rows, q heads * head_dim].

        qkv: [rows, groups * (q_per_kv + 2) * head_dim]
        """
        q_per_kv = self.num_heads // self.num_kv_heads
        if self._sharing is not None:
            q_per_kv //= self._sharing.size
        t = qkv.unflatten(0, (-1, sequence_length)).unflatten(-1, (-1, q_per_kv + 2, self.head_dim))
        q, k, v = (u.flatten(2, 3) for u in t.split((q_per_kv, 1, 1), dim=3))
        if self.q_norm is not None and self.k_norm is not None:
            if self._qk_norm == "all":
                q, k = self.q_norm(q.flatten(2)).view_as(q), self.k_norm(k.flatten(2)).view_as(k)
            else:
                q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (u.transpose(1, 2) for u in (q, k, v))
        positions = mask = lengths = None
        if places is not None:
            positions, mask = self._own(places.positions), self._own(places.mask)
            lengths = self._own(places.lengths)
        seen = sequence_length if mask is None else mask.shape[-1]
        if self.rotary is not None:
            q, k = self.rotary(q, k, positions, seen if lengths is None else lengths)
        if cache is not None:
            assert positions is not None
            k, v = cache.extend(k, v, positions, seen)
        if mask is not None and self.window is not None and self.window < seen:
            assert positions is not None
            keys = positions if cache is None else torch.arange(seen, device=mask.device)[None]
            is_near = keys[:, None, :] > positions[:, :, None] - self.window
            mask = mask & is_near.unsqueeze(1)
        out = attend(q, k, v, mask, scale=self.scale, window=self.window, softcap=self.softcap)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    def _gather(self, qkv: Tensor) -> Tensor:
        """Returns the whole features of a key-value head, gathered from the ranks that share it.

        Backward sums the gradients of these ranks.
        """
        assert self._sharing is not None
        return collectives.all_gather(qkv, self._sharing, dim=1, algorithm=self._algorithm)

    def _own_heads(self, group: Tensor) -> Tensor:
        """Returns this rank's queries, and the key and value, from a group of heads [rows, ...]."""
        assert self._sharing is not None
        queries, rest = group.split([group.shape[1] - 2 * self.head_dim, 2 * self.head_dim], 1)
        own = queries.chunk(self._sharing.size, 1)[self._sharing.rank]
        return torch.cat([own, rest], 1)

    def _own(self, of_group: Tensor | None) -> Tensor | None:
        """Returns the part that belongs to this rank's sequences."""
        if of_group is None or not self.splits_sequences:
            return of_group
        axis = self.qkv.grid.axis("y")
        return own_rows(of_group, axis.rank, axis.size)


def _qk_norm(
    kind: str, num_heads: int, head_dim: int, heads_over_y: bool, plus_one: bool, algorithm: str,
    **options: Any,
) -> HeadNorm | AllHeadsNorm | None:  # fmt: skip
    """Returns the norm of queries or keys. options: of each kind."""
    if kind == "head":
        return HeadNorm(head_dim, plus_one=plus_one, **options)
    if kind == "all":
        size = num_heads * head_dim
        return AllHeadsNorm(size, heads_over_y=heads_over_y, algorithm=algorithm, **options)
    return None
