"""The small inputs on which `parallelize` runs a model, before and after it is split."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from axonn_ext.grid import Grid
from axonn_ext.placement.agreement import checksum
from axonn_ext.placement.layouts import own_block
from axonn_ext.placement.results import shown, tensors_of
from axonn_ext.placement.trace import READS, Flow
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
    """Runs the block with small random numbers in the place of parameters that are all zero.

    Behind a layer of zeros nothing shows what comes before it. The numbers are the same on every
    rank. The parameters are zero again afterwards, also where they have become blocks.
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


def refuse_dropout(model: nn.Module) -> None:
    """Raises ValueError if modules drop activations by their attributes; all are named.

    Ranks that have the same activations would draw different masks for them.
    """
    found = [
        f"  {name or 'the model'} ({type(module).__name__}) has {key}={value}"
        for name, module in model.named_modules()
        for key, value in _drops(module).items()
    ]
    if found:
        raise ValueError(_no_dropout(found))


def refuse_random(model: nn.Module, call: Callable[[], object]) -> None:
    """Raises ValueError if modules draw random numbers in training; all are named.

    Collectives: none. Buffers, modes and the state of random numbers are what they were afterwards.
    """
    buffers = [(b, b.clone()) for b in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    watch = _RandomOps(model)
    try:
        model.train()
        with torch.random.fork_rng(devices), torch.no_grad():
            watch.run(call)
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.copy_(values)
    if watch.found:
        lines = [f"  {name or 'the model'} calls {op}" for name, op in watch.found]
        raise ValueError(_no_dropout(lines))


def _no_dropout(lines: list[str]) -> str:
    return (
        "parallelize: dropout must be 0, since ranks would draw different masks for the same "
        "activations:\n" + "\n".join(lines)
    )


def _drops(module: nn.Module) -> dict[str, Any]:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return {"p": module.p} if module.p > 0 else {}
    attributes = {key: value for key, value in vars(module).items() if "drop" in key}
    return {k: v for k, v in attributes.items() if isinstance(v, float) and v > 0}


class _RandomOps(TorchDispatchMode):
    """Notes which modules call ops that draw random numbers, in the order of the calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.found: dict[tuple[str, str], None] = {}
        self._inside: list[str] = []

    def run(self, call: Callable[[], object]) -> None:
        handles = []
        for name, module in self.model.named_modules():
            handles += [
                module.register_forward_pre_hook(self._enter(name)),
                module.register_forward_hook(self._leave),
            ]
        try:
            with self:
                call()
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda module, args: self._inside.append(name)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self._inside.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_harmless(
            func, args, kwargs or {}, result
        ):
            where = self._inside[-1] if self._inside else ""
            self.found[where, func._schema.name.partition("::")[2]] = None
        return result


def _is_harmless(func: Any, args: Any, kwargs: Any, result: object) -> bool:
    """Whether an op that may draw random numbers draws none, or no mask.

    Fused attention draws only if its dropout_p is not 0. A single number decides whether a layer is
    left out, whose probability is an attribute that `refuse_dropout` knows.
    """
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return not value
    return isinstance(result, Tensor) and result.numel() <= 1


def facts_of(example: ExampleInputs | None) -> list[object]:
    """Returns what ranks must agree on of their example inputs: of tensors a checksum, too."""
    return [
        (tuple(leaf.shape), str(leaf.dtype), checksum(leaf))
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for leaf in tree_flatten(example)[0]
    ]


@torch.no_grad()
def check_outputs(
    call: Callable[[], object], units: Mapping[str, Unit], flow: Flow, grid: Grid
) -> None:
    """Raises RuntimeError if what reaches the units, or the model's outputs, has changed.

    Collectives: those of a forward pass.
    """
    hint = (
        'some code between the modules works across features; let the plan make it "plain". The '
        "model is of no use now"
    )
    arrivals = _Arrivals(units, flow, grid, hint)
    try:
        output = arrivals.run(call)
    except Exception as failure:  # it is anybody's code
        raise RuntimeError(
            f"parallelize: the model on the grid fails: {failure}; {hint}"
        ) from failure
    if arrivals.problems:
        raise RuntimeError(arrivals.problems[0])
    found = tensors_of(output)
    for key, expected in flow.outputs.items():
        if expected.layout != "whole" and not expected.is_features:
            continue
        if key not in found:
            raise RuntimeError(f"parallelize: output {shown(key)} is missing on the grid; {hint}")
        problem = _difference(found[key], expected.tensor)
        if problem:
            raise RuntimeError(f"parallelize: output {shown(key)} {problem}; {hint}")


class _Arrivals:
    """Compares what reaches each unit with this rank's part of what reached it before.

    The pass goes on after a difference, since other ranks may have none and wait for this one.
    """

    def __init__(self, units: Mapping[str, Unit], flow: Flow, grid: Grid, hint: str) -> None:
        self.units, self.flow, self.grid, self.hint = units, flow, grid, hint
        self.problems: list[str] = []
        self._depth = 0  # inside of how many units the pass is, as in the trace

    def run(self, call: Callable[[], object]) -> object:
        handles = []
        for unit in self.units.values():
            handles += [
                unit.module.register_forward_pre_hook(self._enter(unit), with_kwargs=True),
                unit.module.register_forward_hook(self._leave),
            ]
        try:
            return call()
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, unit: Unit) -> Callable[..., None]:
        expected = iter(self.flow.values.get(unit.name, []))
        plain = unit.name in self.flow.problems
        reads = "whole" if plain else READS.get(self.flow.kinds[unit.name], "")

        def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            self._depth += 1
            if self._depth > 1 or not reads:
                return
            found: dict[int | str, object] = dict(enumerate(args))
            found.update(kwargs)
            for key, want in next(expected, {}).items():
                if reads != "whole":
                    want = own_block(want, self.grid.axis(reads))
                got = found.get(key)
                problem = _difference(got, want) if isinstance(got, Tensor) else "is missing"
                if problem:
                    self.problems.append(
                        f"parallelize: what reaches {unit.name} ({unit.what}) {problem}; "
                        f"{self.hint}"
                    )

        return hook

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self._depth -= 1


def _difference(got: Tensor, want: Tensor) -> str:
    """Returns how the tensors differ by more than rounding; empty if they do not."""
    if got.shape != want.shape:
        return f"has shape {list(got.shape)} on the grid instead of {list(want.shape)}"
    limit = {torch.float64: 1e-9, torch.float32: 1e-3}.get(want.dtype, 0.1)
    difference = torch.where(got == want, 0, got - want)  # infinities of masks are equal
    error = (difference.norm() / want.norm().clamp(min=1e-30)).item()
    if error <= limit:
        return ""
    return f"differs by {error:.1e} on the grid (relative norm, limit {limit})"
