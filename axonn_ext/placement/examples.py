"""The small inputs on which `parallelize` runs a model, before and after it is split."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from axonn_ext.placement.trace import Flow, top_level
from axonn_ext.placement.units import Unit

_SEQUENCES, _LENGTH = 2, 4
ExampleInputs = Sequence[object] | Mapping[str, object]


def make_call(
    model: nn.Module, units: Mapping[str, Unit], example: ExampleInputs | None
) -> Callable[[], object]:
    """Returns a function that runs the model on the example, or on inputs of a kind it must take.

    These are token ids if forward has a parameter input_ids or the first module is an embedding,
    else numbers for the first Linear or norm. Raises ValueError if neither is there.
    """
    if isinstance(example, Mapping):
        return lambda: model(**example)
    if example is not None:
        return lambda: model(*example)
    device = next(model.parameters()).device
    names = inspect.signature(model.forward).parameters
    sizes = [u.features[0] for u in units.values() if isinstance(u.module, nn.Embedding)]
    first = next((u for u in units.values() if u.what_family in ("linear", "norm")), None)
    begins = isinstance(next(iter(units.values())).module, nn.Embedding)
    if sizes and ("input_ids" in names or begins):
        count = torch.arange(_SEQUENCES * _LENGTH, device=device) % max(sizes)
        ids = count.view(_SEQUENCES, _LENGTH)
        return lambda: model(input_ids=ids) if "input_ids" in names else model(ids)
    if first is None:
        raise ValueError(
            "parallelize: example_inputs must be given for a model with neither an embedding nor a "
            f"Linear, got a {type(model).__name__}"
        )
    weight = first.module.weight
    assert isinstance(weight, Tensor)
    features = first.features[0]
    count = torch.linspace(-1, 1, _SEQUENCES * _LENGTH * features, device=device)
    rows = count.view(_SEQUENCES, _LENGTH, features).to(weight.dtype)
    return lambda: model(rows)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Runs the block with all modules in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def refuse_dropout(model: nn.Module) -> None:
    """Raises ValueError if a module drops activations.

    Ranks that have the same activations would draw different masks for them.
    """
    for name, module in model.named_modules():
        found: dict[str, Any] = {}
        if isinstance(module, nn.modules.dropout._DropoutNd):
            found = {"p": module.p}
        else:
            found = {key: value for key, value in vars(module).items() if "drop" in key}
        for key, value in found.items():
            if isinstance(value, float) and value > 0:
                raise ValueError(
                    f"parallelize: dropout must be 0, since ranks would draw different masks for "
                    f"the same activations; {name or 'the model'} ({type(module).__name__}) has "
                    f"{key}={value}"
                )


@torch.no_grad()
def check_outputs(call: Callable[[], object], flow: Flow) -> None:
    """Raises RuntimeError if the model's outputs are not what they were."""
    hint = (
        'some code between the modules works across features; let the plan make it "plain". The '
        "model is of no use now"
    )
    try:
        found = top_level(call())
    except (RuntimeError, ValueError) as failure:
        raise RuntimeError(
            f"parallelize: the model on the grid fails: {failure}; {hint}"
        ) from failure
    for key, output in flow.outputs.items():
        if output.layout != "whole" and not output.is_features:
            continue
        want, got = output.tensor, found[key]
        if got.shape != want.shape:
            raise RuntimeError(
                f"parallelize: output {key} has shape {list(got.shape)} on the grid instead of "
                f"{list(want.shape)}; {hint}"
            )
        limit = {torch.float64: 1e-9, torch.float32: 1e-3}.get(want.dtype, 0.1)
        error = ((got - want).norm() / want.norm().clamp(min=1e-30)).item()
        if not error <= limit:
            raise RuntimeError(
                f"parallelize: output {key} differs by {error:.1e} on the grid (relative norm, "
                f"limit {limit}); {hint}"
            )
