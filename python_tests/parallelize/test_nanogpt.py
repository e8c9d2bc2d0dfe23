"""parallelize on nanoGPT's modules: fused q, k and v, views by the number of heads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext import (
    GridShape,
    checkpoint,
    full_gradients,
    full_state_dict,
    global_mean,
    load_full_state_dict,
    parallelize,
    plan_of,
    sync_gradients,
)
from grids import grid_of, relative_error

HIDDEN, HEADS, WORDS, LAYERS, BLOCK = 32, 4, 48, 2, 16


class LayerNorm(nn.Module):
    """As in nanoGPT, with an optional bias and an eps that is a literal."""

    def __init__(self, ndim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    """As in nanoGPT (https://github.com/karpathy/nanoGPT, model.py, MIT)."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(HIDDEN, 3 * HIDDEN, bias=True)
        self.c_proj = nn.Linear(HIDDEN, HIDDEN, bias=True)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.n_head, self.n_embd, self.dropout = HEADS, HIDDEN, 0.0

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Grouped(nn.Module):
    """Two query heads for each key-value head, by the number of heads and head_dim."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = HEADS, HEADS // 2, HIDDEN // HEADS
        self.q_size, self.kv_size = HIDDEN, HIDDEN // 2
        self.qkv, self.out = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        heads = (self.n_head, self.n_kv_head, self.n_kv_head)
        q, k, v = (
            t.view(*t.shape[:2], n, self.head_dim).transpose(1, 2)
            for t, n in zip(parts, heads, strict=True)
        )
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Stacked(nn.Module):
    """Views q, k and v at once, as timm's does."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HIDDEN // HEADS
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, N, C))


class Mixed(CausalSelfAttention):
    """Works across heads, so that no rank can run a part of them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.c_attn(x).mean(-1, keepdim=True)


class Sloped(Stacked):
    """Has a slope for each head, which is right only on the first rank's heads."""

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        slopes = torch.arange(self.num_heads).view(-1, 1, 1) * torch.arange(N)
        y = F.scaled_dot_product_attention(*qkv.unbind(0), attn_mask=slopes.to(x.dtype))
        return self.proj(y.transpose(1, 2).reshape(B, N, C))


class Gated(nn.Module):
    """A fused gate, whose two halves each rank needs a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(HIDDEN, 128), nn.Linear(64, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = LayerNorm(HIDDEN, bias=False), LayerNorm(HIDDEN, bias=True)
        self.attn, self.mlp = attention(), Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module], layers: int) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, HIDDEN),
                "wpe": nn.Embedding(BLOCK, HIDDEN),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(Block(attention) for _ in range(layers)),
                "ln_f": LayerNorm(HIDDEN, bias=False),
            }
        )
        self.lm_head = nn.Linear(HIDDEN, WORDS, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1]))
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def made(attention: Callable[[], nn.Module], layers: int = LAYERS) -> nn.Module:
    torch.manual_seed(3)
    module = GPT(attention, layers).double()
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def message_of(model: nn.Module, shape: GridShape) -> str:
    try:
        parallelize(model, grid_of(shape), verbose=False)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def errors_with(model: nn.Module, plain: nn.Module, shape: GridShape) -> dict[str, float]:
    """Relative errors of logits, loss and gradients."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(WORDS, (2, 8, BLOCK), generator=generator)
    grid = grid_of(shape)
    own, targets = (grid.shard(t, {0: ("data", "z")}) for t in (ids, labels))
    want_logits, want_loss = plain(ids, labels)
    want_loss.backward()
    logits, mean = model(own, targets)
    loss = global_mean(mean * targets.numel(), targets.numel(), grid, axes=("z", "data"))
    loss.backward()
    sync_gradients(model)
    found = {"loss": loss, "logits": logits} | full_gradients(model)
    want = {n: p.grad for n, p in plain.named_parameters()} | {"loss": want_loss}
    want["logits"] = grid.shard(want_logits, {0: ("data", "z")})
    assert found.keys() == want.keys()
    return (
        {
            n: ((found[n] - want[n]).norm() / (1e-3 + want[n].norm())).item()
            for n in want
            if not n.endswith(".attn.c_attn.bias")
        }
        | {  # a third of it, for the keys, has no gradient
            n: relative_error(found[n][-HIDDEN:], want[n][-HIDDEN:])
            for n in want
            if n.endswith(".attn.c_attn.bias")
        }
    )


def proposed(attention: Callable[[], nn.Module], shape: GridShape, layers: int) -> list[Any]:
    """The message, the plan in it, and with that plan the errors and whether the state is whole."""
    model = made(attention, layers)
    message = message_of(model, shape)
    plan = {}
    if message:
        plan = eval(message.rpartition(" plan=")[2], {"model": model})
        assert all(torch.equal(a, b) for a, b in zip(
            model.parameters(), made(attention, layers).parameters(), strict=True
        )), "the model has not changed"  # fmt: skip
        parallelize(model, grid_of(shape), plan, verbose=False)
    plain = made(attention, layers)
    errors = errors_with(model, plain, shape)
    state, want = full_state_dict(model), dict(plain.named_parameters())
    same = all(torch.equal(state[n], want[n]) for n in want)
    load_full_state_dict(model, {n: p + 1 for n, p in want.items()})
    state = full_state_dict(model)
    same = same and all(torch.equal(state[n], want[n] + 1) for n in want)
    return [
        message,
        plan,
        max(errors.values()),
        same,
        {k: v for k, v in vars(model.transformer.h[0].attn).items() if isinstance(v, int)},
    ]


GRIDS = [GridShape(x=2), GridShape(x=2, y=2), GridShape(x=2, z=2), GridShape(x=4)]


@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_nanogpt_runs_with_the_plan_of_the_error(pool, shape):
    size = shape.x * shape.y * shape.z
    for layers in (1, LAYERS):
        for message, plan, error, same, attributes in pool(size).run(
            proposed, CausalSelfAttention, shape, layers
        ):
            assert (
                "ValueError: " in message and "CausalSelfAttention has heads (n_head=4)" in message
            )
            if layers == 1:
                assert 'by plan={"transformer.h.0.attn": "local_heads"}' in message
            assert plan == {f"transformer.h.{i}.attn": "local_heads" for i in range(layers)}
            assert error < 1e-11 and same
            assert attributes["n_head"] == HEADS // shape.x


@pytest.mark.parametrize("attention", [Grouped, Stacked], ids=lambda kind: kind.__name__)
def test_other_fused_projections_run_with_the_plan_of_the_error(pool, attention):
    for shape in (GridShape(x=2), GridShape(x=2, y=2)):
        for message, plan, error, same, _ in pool(shape.x * shape.y).run(
            proposed, attention, shape, LAYERS
        ):
            assert message and set(plan.values()) == {"local_heads"}
            assert error < 1e-11 and same


def test_without_x_no_plan_is_needed(pool):
    for message, _, error, same, attributes in pool(2).run(
        proposed, CausalSelfAttention, GridShape(y=2), LAYERS
    ):
        assert not message and error < 1e-11 and same and attributes["n_head"] == HEADS


@pytest.mark.parametrize("attention", [Mixed, Sloped], ids=lambda kind: kind.__name__)
def test_code_across_heads_is_made_plain(pool, attention):
    for message, plan, error, same, _ in pool(2).run(proposed, attention, GridShape(x=2), LAYERS):
        assert f"{attention.__name__} cannot run on a part of the heads" in message
        assert set(plan.values()) == {"plain"} and error < 1e-11 and same


PLAN = {f"transformer.h.{i}.attn": "local_heads" for i in range(LAYERS)}


def further(folder: str) -> dict[str, Any]:
    grid = grid_of(GridShape(x=2, y=2))
    model = parallelize(made(CausalSelfAttention), grid, PLAN, verbose=False)
    plan = plan_of(model)
    again = parallelize(made(CausalSelfAttention), grid, plan, verbose=False)
    ids = torch.arange(6).view(1, 6)
    checkpoint.save(folder, model=model)
    for parameter in again.parameters():
        parameter.data.zero_()
    checkpoint.load(folder, model=again)
    twin = copy.deepcopy(model)
    model.transformer.h[0].attn.c_attn.weight.data.zero_()
    return {
        "plan": str(plan),
        "loaded": torch.equal(again(ids)[0], twin(ids)[0]),
        "twin": not torch.equal(twin(ids)[0], model(ids)[0]),
        "kept": twin.transformer.h[0].attn(torch.ones(1, 3, HIDDEN // 2).double()).shape,
    }


def test_plans_checkpoints_and_copies(pool, tmp_path):
    for found in pool(4).run(further, str(tmp_path / "saved")):
        assert "transformer.h.*.attn: runs on this rank's heads" in found["plan"]
        assert found["loaded"] and found["twin"]
        assert found["kept"] == (1, 3, HIDDEN // 2)
