"""Options of parameters by patterns of their names."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from axonn_ext.optim import AdamW, ParameterGroup, freeze

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
GROUPS = (
    ParameterGroup("*.bias, 1.weight", weight_decay=0.7),
    ParameterGroup("0.*", lr_factor=0.25),
    ParameterGroup("3.*", frozen=True),
)


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3), nn.LayerNorm(3)]
    return nn.Sequential(*layers).to(dtype)


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if parameter.requires_grad:
            parameter.grad = gradient.to(parameter.dtype)


def trained(model: nn.Module, **options) -> nn.Module:
    freeze(model, GROUPS)
    optimizer = AdamW(model, weight_decay=0.5, groups=GROUPS, **OPTIONS, **options)
    for step in range(4):
        set_gradients(model, step)
        optimizer.step(OPTIONS["lr"] / (1 + step))
    optimizer.close()
    return model


def test_groups_are_those_of_torch() -> None:
    ours, theirs = small_model(), small_model()
    initial = copy.deepcopy(theirs)
    named = dict(theirs.named_parameters())
    # The first group that matches counts, so "3.bias" is not frozen.
    biases = ("0.bias", "1.bias", "2.bias", "3.bias", "1.weight")
    reference = torch.optim.AdamW(
        [
            {"params": [named["2.weight"]], "weight_decay": 0.5, "factor": 1},
            {"params": [named[name] for name in biases], "weight_decay": 0.7, "factor": 1},
            {"params": [named["0.weight"]], "weight_decay": 0.5, "factor": 0.25},
        ],
        **OPTIONS,
        fused=True,
    )
    for step in range(4):
        set_gradients(theirs, step)
        for group in reference.param_groups:
            group["lr"] = OPTIONS["lr"] / (1 + step) * group["factor"]
        reference.step()
    trained(ours)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(ours[3].weight, initial[3].weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_groups_train_the_same(dtype: torch.dtype, tmp_path) -> None:
    want = trained(small_model(dtype))
    for offload in ("cpu", "disk"):
        model = trained(small_model(dtype), offload=offload, folder=tmp_path, bucket_elements=16)
        for a, b in zip(model.parameters(), want.parameters(), strict=True):
            assert torch.equal(a, b)


def test_the_first_group_counts() -> None:
    model = small_model()
    groups = (ParameterGroup("*.bias", lr_factor=2.0), ParameterGroup("*", lr_factor=3.0))
    optimizer = AdamW(model, lr=1.0, groups=groups)
    assert {len(optimizer.pieces_of(p) or ()) for p in model.parameters()} == {1}
    numbers = {name: optimizer.pieces_of(p)[0].group for name, p in model.named_parameters()}
    assert numbers == {name: int(name.endswith("weight")) for name in numbers}
    optimizer.step(0.5)
    rates = [options["lr"] for options in optimizer.options]
    assert rates == [0.5, 0.5, 1.0, 1.0, 1.5, 1.5]


def test_groups_need_names() -> None:
    with pytest.raises(ValueError, match="groups need a module, which has names"):
        AdamW(small_model().parameters(), lr=1.0, groups=GROUPS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ""}, "names must be patterns of names, separated by commas, got ''"),
        ({"names": "a,,b"}, "names must be patterns of names, separated by commas, got 'a,,b'"),
        ({"names": "*", "lr_factor": -1.0}, "lr_factor must be a finite number >= 0, got -1.0"),
        ({"names": "*", "weight_decay": -2.0},
         "weight_decay must be -1 or a finite number >= 0, got -2.0"),
        ({"names": "*", "frozen": 1}, "frozen must be true or false, got 1"),
    ],
)  # fmt: skip
def test_bad_options_are_named(options, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ParameterGroup(**options)
    assert str(caught.value) == message
