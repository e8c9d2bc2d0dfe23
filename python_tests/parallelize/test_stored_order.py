"""Checkpoints of models whose Conv1D weights have a different order on a grid."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from axonn_ext import GridShape, checkpoint, full_state_dict, parallelize
from grids import grid_of

HIDDEN, HEADS = 16, 4


class Conv1D(nn.Module):
    """Has the name and the layout of transformers' Conv1D."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 4)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class GPT2Attention(nn.Module):
    """Has the name, children and attributes of transformers' GPT2Attention."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.split_size = HEADS, HIDDEN // HEADS, HIDDEN
        self.c_attn, self.c_proj = Conv1D(3 * HIDDEN, HIDDEN), Conv1D(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).split(self.split_size, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in parts)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def made(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(8, HIDDEN), GPT2Attention(), nn.LayerNorm(HIDDEN))


def saved_and_loaded(folder: str) -> dict[str, str]:
    """The error of loading, by grid; "" if every value equals the saved one."""
    model = made(0)
    parallelize(model, grid_of(GridShape(x=2, y=2)), verbose=False)
    checkpoint.save(folder, model=model)
    want, found = full_state_dict(model), {}
    for shape, plan in (
        (GridShape(x=2, z=2), {}),
        (GridShape(x=4), {}),
        (GridShape(y=4), {}),
        (GridShape(x=2, y=2), {"1.c_proj": "plain"}),
    ):
        other = made(1)
        parallelize(other, grid_of(shape), plan, verbose=False)
        try:
            checkpoint.load(folder, model=other)
            loaded = full_state_dict(other)
            wrong = [n for n in want if not torch.equal(want[n], loaded[n])]
            found[f"{shape.short()} {plan}"] = f"wrong values: {wrong}" if wrong else ""
        except checkpoint.CheckpointError as error:
            found[f"{shape.short()} {plan}"] = str(error)
    return found


def test_another_order_is_refused_by_name(pool, tmp_path):
    """c_attn's columns are ordered by x, and a plain c_proj is stored as [K, N]."""
    for found in pool(4).run(saved_and_loaded, str(tmp_path / "saved")):
        same, x4, y4, plain = found.values()
        assert same == ""
        assert "1.c_attn.weight@transposed,x=2" in x4 and "1.c_attn.weight@transposed,x=4" in x4
        assert "1.c_attn.weight@transposed" in y4 and "full_state_dict has the same" in y4
        assert "x=1" not in y4, "with x=1 the order is that of the model"
        assert "1.c_proj.weight@transposed" in plain
