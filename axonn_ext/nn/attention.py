"""Causal self-attention; each rank has whole sequences and whole key-value head groups."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from axonn_ext.kernels import host
from axonn_ext.nn.linear import Linear
from axonn_ext.nn.norm import HeadNorm
from axonn_ext.nn.sequences import KeyValueCache, Places
from axonn_ext.nn.sharded import Init, own_rows
from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.model import RopeScaling
from axonn_ext.spec.rules import ranks_of_a_kv_head


class Rotary(nn.Module):
    """Rotary position embedding, which rotates feature i of a head together with i + head_dim / 2.

    Source: Su et al., arXiv:2104.09864. Llama's public weights pair the features in the same way.

    Raises ValueError for an odd head_dim, or if this machine lacks the memory for the tables.
    """

    def __init__(
        self,
        head_dim: int,
        max_length: int,
        theta: float = 10000.0,
        *,
        scaling: RopeScaling | None = None,
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"Rotary: head_dim must be even, got {head_dim}")
        needed = 4 * 8 * max_length * head_dim  # the tables in fp64 below, two of which stay
        there = host.memory_bytes()
        if needed > there / 2:
            raise ValueError(
                f"Rotary: the tables of {max_length:,} positions need {needed / 1e9:,.1f} GB, this "
                f"machine has {there / 1e9:,.1f} GB: give a smaller sequence_length"
            )
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        if scaling is not None:
            frequencies = _scaled(frequencies, scaling)
        angles = torch.outer(torch.arange(max_length, dtype=torch.float64), frequencies)
        angles = torch.cat([angles, angles], -1)  # [max_length, head_dim]
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(
        self, queries: Tensor, keys: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns q and k, [sequences, heads, length, head_dim], rotated by their positions.

        positions: [sequences, length]; None: 0, 1, 2, ... in each sequence.
        """
        if positions is None:
            length = queries.shape[-2]
            cos, sin = self.cos[:length], self.sin[:length]
        else:
            cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        cos, sin = cos.to(queries.dtype), sin.to(queries.dtype)
        return _rotated(queries, cos, sin), _rotated(keys, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Returns the frequencies with long wavelengths stretched; see RopeScaling."""
    waves = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # per sequence
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((waves - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


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

    head_norm_eps: if given, RMSNorms over the features of a head normalise queries and keys before
    they are rotated (q_norm, k_norm), as in Qwen3. bias: of qkv and, unless out_bias is given, of
    the out-projection.

    recompute: recomputes everything between the two Linears in backward: norms of queries and keys,
    their rotation and the scaled dot products. Autograd then keeps only the result of qkv and the
    input of the out-projection. No collective is repeated: exchanges of heads belong to the
    Linears, and features of shared key-value heads are kept gathered.

    places: the positions of the tokens and what they attend to, for all sequences of the (data, z)
    group; default each sequence from position 0, causally. cache: stores keys and values, and
    provides those of earlier tokens (layout "replicated" only; requires `places`).

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
        head_norm_eps: float | None = None,
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
        self.rotary = rotary
        head_axes = ("x", "y") if heads_over_y else ("x",)
        parts = grid.num_parts(head_axes)
        shared = ranks_of_a_kv_head(num_heads, self.num_kv_heads, parts)
        if not shared or (shared > 1 and heads_over_y):
            splits_heads = parts % self.num_kv_heads == 0 and not heads_over_y
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
        self.q_norm: HeadNorm | None = None
        self.k_norm: HeadNorm | None = None
        if head_norm_eps is not None:
            options: dict[str, Any] = {
                "grid": grid, "eps": head_norm_eps, "layout": layout, "seed": seed,
                "dtype": dtype, "device": device,
            }  # fmt: skip
            self.q_norm = HeadNorm(self.head_dim, **options)
            self.k_norm = HeadNorm(self.head_dim, **options)

    def forward(
        self,
        x: Tensor,
        sequence_length: int,
        places: Places | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        qkv = self.qkv(x)  # [sequences * length, groups * (q_per_kv + 2) * head_dim]
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
        return self.out(out)

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
        q, k, v = (u.flatten(2, 3).transpose(1, 2) for u in t.split((q_per_kv, 1, 1), dim=3))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        positions = mask = None
        if places is not None:
            positions, mask = self._own(places.positions), self._own(places.mask)
        if self.rotary is not None:
            q, k = self.rotary(q, k, positions)
        if cache is not None:
            assert positions is not None
            seen = sequence_length if mask is None else mask.shape[-1]
            k, v = cache.extend(k, v, positions, seen)
        if mask is not None and q_per_kv > 1 and sequence_length > 1:
            # No fused GPU kernel supports both a mask and grouped heads.
            k, v = k.repeat_interleave(q_per_kv, 1), v.repeat_interleave(q_per_kv, 1)
            q_per_kv = 1
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q_per_kv > 1
        )
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
