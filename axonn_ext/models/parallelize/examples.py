"""The small inputs on which `parallelize` runs a model before and after splitting it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from axonn_ext.models.parallelize.same import text_of
from axonn_ext.models.parallelize.units import Unit

_SEQUENCES, _LENGTH = 2, 4
ExampleInputs = Sequence[object] | Mapping[str, object]


def make_call(
    model: nn.Module, units: Mapping[str, Unit], example: ExampleInputs | None
) -> Callable[[], object]:
    """Returns a function that runs the model on the example, or on generated inputs.

    These are token ids if forward has a parameter input_ids or the first module is an embedding,
    else numbers for the first Linear or norm. Raises ValueError if there is none of these.
    """
    if isinstance(example, Mapping):
        return lambda: model(**example)
    if example is not None:
        return lambda: model(*example)
    device = next(model.parameters()).device
    names = inspect.signature(model.forward).parameters
    sizes = [u.features[0] for u in units.values() if isinstance(u.module, nn.Embedding)]
    first = next((u for u in units.values() if u.is_linear or u.is_norm), None)
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


@contextmanager
def without_zeros(model: nn.Module) -> Iterator[None]:
    """Runs the block with small random numbers in place of parameters that are all zero.

    A layer of zeros would hide everything before it. The numbers are the same on every rank. The
    parameters are zero again afterwards, even if they have become blocks.
    """
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    zeros = [p for p in parameters if p.numel() and not p.detach().any()]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in zeros:
            p.copy_(0.05 * torch.randn(p.shape, generator=generator))
    try:
        yield
    finally:
        for p in zeros:
            p.data.zero_()


def facts_of(example: ExampleInputs | None) -> dict[str, str]:
    """Returns the properties of example inputs that ranks compare, with digests of tensors."""
    inputs = {f"example input {i}": leaf for i, leaf in enumerate(tree_flatten(example)[0])}
    return {
        name: text_of("parallelize", name, leaf)
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for name, leaf in inputs.items()
    }
