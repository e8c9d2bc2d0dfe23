"""Finds the modules of a model that draw random numbers in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


def refuse_dropout(model: nn.Module) -> None:
    """Raises ValueError, which names all modules whose attributes enable dropout, if any.

    Ranks with the same activations would draw different masks for them.
    """
    found = [
        f"  {name or 'the model'} ({type(module).__name__}) has {key}={value}"
        for name, module in model.named_modules()
        for key, value in _drops(module).items()
    ]
    if found:
        raise ValueError(_no_dropout(found))


def refuse_random(model: nn.Module, call: Callable[[], object]) -> None:
    """Raises ValueError, which names all modules that draw random numbers in training, if any.

    Collectives: none. Buffers, modes and the random number state are restored afterwards.
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
    """Records which modules call ops that draw random numbers, in the order of the calls."""

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

    Fused attention draws only if its dropout_p is not 0. A single number is for skipping whole
    layers, whose probability is an attribute that `refuse_dropout` checks.
    """
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return not value
    return isinstance(result, Tensor) and result.numel() <= 1
