"""Low-rank adapters on every grid, against plain PyTorch with merged weights."""

from __future__ import annotations

import pytest
import torch

from axonn_ext import (
    GridShape,
    clip_grad_norm_,
    full_gradients,
    full_state_dict,
    load_full_state_dict,
    models,
    sync_gradients,
)
from axonn_ext.models import ParallelConfig
from axonn_ext.models.plain import PlainTransformer
from axonn_ext.models.pretrained import adapters_of, add_adapters, merge_adapters
from axonn_ext.models.transformer import Transformer
from grids import every_grid, grid_of, turns
from model_cases import CONFIGS, random_batch, sampled

RANK, ALPHA, MAX_NORM = 3, 7.0, 0.05
PARALLEL = {
    "sharded": ParallelConfig(),
    "replicated": ParallelConfig(layout="replicated"),
    "recompute": ParallelConfig(recompute="full"),
}
TARGETS = {"all": ["all-linear"], "some": ["q_proj", "v_proj", "down_proj", "gate_proj"]}


def adapted(grid, name: str, options: str, targets: str) -> Transformer:
    """A model with nonzero adapters, the same on every grid."""
    model = models.build(CONFIGS[name], grid, PARALLEL[options], seed=2, dtype=torch.float64)
    add_adapters(model, rank=RANK, alpha=ALPHA, targets=TARGETS[targets], seed=4)
    state = full_state_dict(model)
    for key, value in state.items():
        if "lora_B" in key:
            assert (value == 0).all()
            generator = torch.Generator().manual_seed(sum(key.encode()))
            value.copy_(0.3 * torch.randn(value.shape, generator=generator, dtype=value.dtype))
    load_full_state_dict(model, state)
    return model


def plain_weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of the plain model, as functions of the adapters."""
    weights = {name: value for name, value in state.items() if ".lora_" not in name}
    for name, a in state.items():
        if name.endswith(".lora_A.weight"):
            key = name.replace(".lora_A.", ".")
            update = ALPHA / RANK * state[name.replace("lora_A", "lora_B")] @ a
            transposed = key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
            weights[key] = weights[key] + (update.t() if transposed else update)
    return weights


def errors(name: str, options: str, targets: str) -> list[tuple[str, float]]:
    found = []
    case = list(PARALLEL).index(options) + ("gpt2", "llama", "opt").index(name)
    for grid in turns(every_grid(), case):
        model = adapted(grid, name, options, targets)
        state = full_state_dict(model)
        trained = {n: v.requires_grad_() for n, v in state.items() if ".lora_" in n}
        assert trained
        plain = PlainTransformer(CONFIGS[name]).double()
        ids, labels = random_batch()
        logits = torch.func.functional_call(plain, plain_weights(state), (ids,))
        want_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        grads = torch.autograd.grad(want_loss, list(trained.values()))
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        scale = min(1.0, MAX_NORM / (norm.item() + 1e-6))
        want = {n: g * scale for n, g in zip(trained, grads, strict=True)}
        own = {0: ("data", "z")}
        loss = model.loss(grid.shard(ids, own), grid.shard(labels, own))
        loss.backward()
        sync_gradients(model)
        found_norm = clip_grad_norm_(model, MAX_NORM)
        got = full_gradients(model)
        assert got.keys() == want.keys(), "something else trains, or something does not"
        pairs = [(got[n], want[n]) for n in want]
        pairs += [(loss.detach(), want_loss.detach()), (found_norm, norm.detach())]
        # Rows of the keys' B may have no gradient except rounding; whole parameters have one.
        error = max(((g - w).norm() / w.norm()).item() for g, w in pairs)
        found.append((str(grid.shape), error))
    return found


@pytest.mark.parametrize(("name", "world_size"), sampled(("gpt2", "llama", "opt"), (1, 2, 4)))
@pytest.mark.parametrize("options", PARALLEL)
def test_loss_and_gradients_are_those_of_plain_pytorch(name, world_size, options, pool) -> None:
    targets = (
        "some" if (name, options) in (("llama", "sharded"), ("llama", "replicated")) else "all"
    )
    for found in pool(world_size).run(errors, name, options, targets):
        for shape, error in found:
            # fp64 sums of at most 64 terms in different orders. Without rotary positions, the
            # gradient of the keys' bias is only rounding, but that bias is not trained.
            assert error < 1e-11, shape


def merged(name: str, targets: str) -> list[tuple[str, float, int]]:
    found = []
    for grid in every_grid():
        model = adapted(grid, name, "replicated", targets)
        ids = grid.shard(random_batch()[0], {0: ("data", "z")})
        with torch.no_grad():
            before = model(ids)
            merge_adapters(model)
            error = ((model(ids) - before).norm() / before.norm()).item()
        assert all(p.requires_grad for p in model.parameters())
        assert not any(".lora_" in key for key in full_state_dict(model))
        found.append((str(grid.shape), error, len(adapters_of(model))))
    return found


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize(("name", "targets"), [("gpt2", "all"), ("llama", "some")])
def test_merged_weights_compute_the_same(name, targets, world_size, pool) -> None:
    for found in pool(world_size).run(merged, name, targets):
        for shape, error, left in found:
            assert error < 1e-12, shape  # fp64
            assert left == 0


def is_rounded_once() -> bool:
    model = models.build(CONFIGS["llama"], grid_of(GridShape()), seed=2, dtype=torch.bfloat16)
    add_adapters(model, rank=RANK, alpha=ALPHA, targets="down_proj", seed=4)
    want = []
    with torch.no_grad():
        for linear, adapter in adapters_of(model):
            (target,) = adapter.targets
            a, b = adapter.a(target).float(), adapter.b(target).normal_().float()
            sum_of_both = linear.weight.float() + b @ a * (ALPHA / RANK)
            want.append((linear, sum_of_both.bfloat16()))
    merge_adapters(model)
    return bool(want) and all(torch.equal(linear.weight, merged) for linear, merged in want)


def test_a_merge_in_low_precision_is_rounded_once(pool) -> None:
    assert pool(1).run(is_rounded_once) == [True]


def initial(name: str) -> list[dict[str, torch.Tensor]]:
    found = []
    for grid in every_grid():
        model = models.build(CONFIGS[name], grid, seed=2)
        add_adapters(model, rank=RANK, alpha=ALPHA, seed=4)
        found.append(full_state_dict(model))
    return found


def test_initial_values_are_the_same_on_every_grid(pool) -> None:
    [want] = pool(1).run(initial, "qwen3")[0]
    bound = CONFIGS["qwen3"].hidden_size ** -0.5
    largest = want["model.layers.0.self_attn.q_proj.lora_A.weight"].abs().max().item()
    assert 0.8 * bound < largest <= bound
    for state in pool(4).run(initial, "qwen3")[0]:
        assert state.keys() == want.keys()
        assert all(torch.equal(state[key], value) for key, value in want.items())


def refused(options: dict) -> str:
    shape = every_grid()[0].shape
    parallel = ParallelConfig(heads_over_y=options.pop("heads_over_y", False))
    model = models.build(CONFIGS["llama"], grid_of(shape), parallel)
    with pytest.raises(ValueError, match=r"\S") as error:
        add_adapters(model, **({"rank": 2, "alpha": 2.0} | options))
    assert not adapters_of(model)
    assert all(p.requires_grad for p in model.parameters())
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be a whole number from 1 to 32, got 0"),
        ({"targets": ["c_attn"]}, "targets must be all-linear, or some of down_proj, gate_proj"),
        ({"targets": []}, "got none"),
        ({"heads_over_y": True}, "heads_over_y is not supported"),
    ],
)
def test_mistakes_are_named(options, message, pool) -> None:
    assert message in pool(1).run(refused, options)[0]
