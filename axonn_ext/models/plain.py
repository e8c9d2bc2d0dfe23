"""A model in plain torch.nn for one process: the reference for the results of every grid.

The names and layouts of its state dict are those of the family's Hugging Face model. It loads the
`axonn_ext.full_state_dict` of a model on any grid, and such a model loads its state dict.

B sequences of S tokens, H hidden features, D features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.rope import frequencies

IGNORED_LABEL = -100


class PlainTransformer(nn.Module):
    """A language model in one process, for all families."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.names = names = config.traits.hugging_face.names
        size = config.hidden_size
        _place(self, f"{names.body}.{names.table}", nn.Embedding(config.vocab_size, size))
        if not config.traits.rotary:
            positions = nn.Embedding(config.num_positions, size)
            _place(self, f"{names.body}.{names.positions}", positions)
        for number in range(config.num_layers):
            _place(self, names.of_block(number)[:-1], Block(config, number))
        _place(self, f"{names.body}.{names.norm}", _norm(config, size))
        head = nn.Linear(size, config.vocab_size, bias=False)
        _place(self, names.head, head)
        self.apply(self._initialise)
        if config.tie_embeddings:
            head.weight = self._table.weight

    @property
    def _table(self) -> nn.Embedding:
        table = self.get_submodule(f"{self.names.body}.{self.names.table}")
        assert isinstance(table, nn.Embedding)
        return table

    def forward(self, token_ids: Tensor) -> Tensor:
        """Returns logits [B, S, V] for token ids [B, S]."""
        config, names = self.config, self.names
        x = self._table(token_ids) * config.embedding_factor
        if not config.traits.rotary:
            positions = torch.arange(token_ids.shape[1], device=token_ids.device)
            table = self.get_submodule(f"{names.body}.{names.positions}")
            x = x + table(positions + config.traits.position_offset)
        for number in range(config.num_layers):
            x = self.get_submodule(names.of_block(number)[:-1])(x)
        x = self.get_submodule(f"{names.body}.{names.norm}")(x)
        logits = self.get_submodule(names.head)(x) * config.logits_scale
        cap = config.logits_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def loss(
        self, token_ids: Tensor, labels: Tensor, num_labels: float | Tensor | None = None
    ) -> Tensor:
        """Returns the cross-entropy, summed over labelled tokens and divided by `num_labels`.

        num_labels: default the number of labelled tokens of this call. Tokens with the label -100
        are not counted. The loss is computed in fp32 (fp64 for fp64).
        """
        logits = self(token_ids).flatten(0, 1)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        total = F.cross_entropy(
            logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        if num_labels is None:
            num_labels = (labels != IGNORED_LABEL).sum()
        return total / num_labels

    def _initialise(self, module: nn.Module) -> None:
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 2:  # a matrix, or a table
            nn.init.normal_(weight, std=self.config.init_std)


class Block(nn.Module):
    """A block, whose modules have transformers' names."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.config, self.number = config, number
        self.names = names = config.traits.hugging_face.names
        for norm in config.traits.norms:
            _place(self, names.block[norm], _norm(config, config.hidden_size))
        qkv, out, up, down = config.block_linears
        heads = (config.num_heads, config.kv_heads, config.kv_heads)
        self._place_linears(names.qkv, [n * config.head_dim for n in heads], qkv.k, qkv.bias)
        self._place_linears((names.block["attention.out"],), [out.n], out.k, out.bias)
        for norm, count in (("q_norm", config.num_heads), ("k_norm", config.kv_heads)):
            if qk_norm := config.traits.qk_norm:
                size = config.head_dim * (count if qk_norm == "all" else 1)
                _place(self, names.block[f"attention.{norm}"], _norm(config, size))
        if config.traits.gated:
            self._place_linears(names.gate_up, [config.mlp_size] * 2, up.k, up.bias)
        else:
            self._place_linears((names.block["mlp.up"],), [up.n], up.k, up.bias)
        self._place_linears((names.block["mlp.down"],), [down.n], down.k, down.bias)

    def _place_linears(
        self, names: Sequence[str], sizes: Sequence[int], k: int, bias: bool
    ) -> None:
        """Places Linears with these numbers of outputs, or one with all of them."""
        kind = Conv1D if self.names.transposed else nn.Linear
        sizes = sizes if len(names) == len(sizes) else [sum(sizes)]
        for name, size in zip(names, sizes, strict=True):
            _place(self, name, kind(k, size, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        traits, scale = self.config.traits, self.config.residual_scale
        first = self._normed("norm_1", x)
        attended = x + self._normed("after_1", self._attention(first)) * scale
        if traits.parallel:
            second = self._normed("norm_2", x) if "norm_2" in traits.norms else first
        else:
            second = self._normed("norm_2", attended)
        return attended + self._normed("after_2", self._mlp(second)) * scale

    def _normed(self, norm: str, x: Tensor) -> Tensor:
        return self._run(norm, x) if norm in self.config.traits.norms else x

    def _run(self, ours: str, x: Tensor) -> Tensor:
        return self.get_submodule(self.names.block[ours])(x)

    def _attention(self, x: Tensor) -> Tensor:
        config = self.config
        q, k, v = self._queries_keys_values(x)
        if config.traits.qk_norm:
            q, k = self._run_qk_norm("q_norm", q), self._run_qk_norm("k_norm", k)
        if config.rotates(self.number):
            local = config.is_local(self.number)
            q, k = _rotate(q, config, local), _rotate(k, config, local)
        out = _attend(q, k, v, config, config.window_of(self.number))
        return self._run("attention.out", out.transpose(1, 2).flatten(2))

    def _run_qk_norm(self, name: str, x: Tensor) -> Tensor:
        """Normalises queries or keys, [B, heads, S, D]."""
        if self.config.traits.qk_norm == "head":
            return self._run(f"attention.{name}", x)
        rows = x.transpose(1, 2)
        return self._run(f"attention.{name}", rows.flatten(2)).view_as(rows).transpose(1, 2)

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        """Returns q, k and v, [B, heads, S, D] each."""
        config, qkv = self.config, self.names.qkv
        found = torch.cat([self.get_submodule(name)(x) for name in qkv], -1)
        heads = found.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        counts = [config.num_heads, config.kv_heads, config.kv_heads]
        if not self.names.grouped:
            return list(heads.split(counts, 1))
        per_group = config.num_heads // config.kv_heads
        groups = heads.unflatten(1, (config.kv_heads, -1))
        return [part.flatten(1, 2) for part in groups.split([per_group, 1, 1], 2)]

    def _mlp(self, x: Tensor) -> Tensor:
        if not self.config.traits.gated:
            up = self._run("mlp.up", x)
            if self.config.traits.activation == "relu":
                return self._run("mlp.down", F.relu(up))
            form = "tanh" if self.config.traits.activation == "gelu" else "none"
            return self._run("mlp.down", F.gelu(up, approximate=form))
        found = torch.cat([self.get_submodule(name)(x) for name in self.names.gate_up], -1)
        gate, up = found.chunk(2, -1)
        is_silu = self.config.traits.activation == "swiglu"
        gate = F.silu(gate) if is_silu else F.gelu(gate, approximate="tanh")
        return self._run("mlp.down", gate * up)


class Conv1D(nn.Module):
    """GPT-2's linear layer, which stores its weight transposed: [in_features, out_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight
        return out if self.bias is None else out + self.bias


def _place(root: nn.Module, name: str, module: nn.Module) -> None:
    """Adds the module below root, with the modules between them that its name asks for."""
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(last, module)


class RMSNormPlusOne(nn.Module):
    """RMSNorm whose rows are multiplied by 1 + weight, as in Gemma."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


def _norm(config: ModelConfig, size: int) -> nn.Module:
    norm = config.traits.norm
    if norm.centred:
        return nn.LayerNorm(size, eps=config.norm_eps, bias=norm.num_vectors == 2)
    kind = RMSNormPlusOne if norm.plus_one else nn.RMSNorm
    return kind(size, eps=config.norm_eps)


def _attend(q: Tensor, k: Tensor, v: Tensor, config: ModelConfig, window: int | None) -> Tensor:
    """Returns causal attention, [B, heads, S, D]."""
    rows = torch.arange(q.shape[2], device=q.device)
    mask = (rows <= rows[:, None]) & (rows > rows[:, None] - (window or len(rows)))
    if config.attention_softcap is None:
        if window is None or window >= len(rows):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=config.score_scale, enable_gqa=True
            )
        return F.scaled_dot_product_attention(
            q, k, v, mask, scale=config.score_scale, enable_gqa=True
        )
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    cap = config.attention_softcap
    scores = cap * torch.tanh(q @ k.transpose(-1, -2) * config.score_scale / cap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def _rotate(x: Tensor, config: ModelConfig, local: bool) -> Tensor:
    """Rotates the first features of each head, [B, heads, S, D], by the angles of its position.

    Feature i is rotated with i + half of them, or 2 i with 2 i + 1, as in Hugging Face's model.
    """
    size = config.rotary_dim
    length = x.shape[2]
    theta, scaling = config.rope_theta, config.rope_scaling
    if local:
        assert config.local_theta is not None
        theta, scaling = config.local_theta, None
    found, factor = frequencies(theta, size, scaling, length)
    positions = torch.arange(length, device=x.device, dtype=torch.float64)
    angles = torch.outer(positions, torch.tensor(found, device=x.device, dtype=torch.float64))
    cos, sin = (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)
    rotated, rest = x[..., :size], x[..., size:]
    dim = -1 if config.traits.interleaved else -2
    shape = (-1, 2) if config.traits.interleaved else (2, -1)
    first, second = rotated.unflatten(-1, shape).unbind(dim)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim)
    return torch.cat((turned.flatten(-2), rest), -1)
