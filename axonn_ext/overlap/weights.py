"""Gathers weights over z before they are used; implements `ShardedModule.weight_source`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from axonn_ext import _C
from axonn_ext.nn.deferred import in_backward
from axonn_ext.nn.sharded import ShardedParameter
from axonn_ext.overlap.lane import Collective, Lane

_PHASE_NAMES = {
    _C.Phase.FORWARD: "forward",
    _C.Phase.BACKWARD: "backward",
    _C.Phase.INFERENCE: "inference",
}


class GradientSink(Protocol):
    """Receives the gradients of gathered weights."""

    def expect(self, parameter: nn.Parameter) -> None:
        """Announces that a gradient of this parameter will follow, if backward reaches it."""

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Takes one gradient of the whole weight, computed from this rank's rows of the batch."""

    def backward_runs(self) -> None:
        """Is called at least once in every backward pass that uses a weight."""


@dataclass(eq=False)
class Weight:
    """A parameter, and the storage of the whole weight, which autograd's tensors share.

    whole    [Gz * rows, ...]; its storage is empty while the weight is not gathered
    version  the parameter's version counter when the weight was last gathered
    target   a tensor that shares its memory but has its own version counter, so that autograd does
             not mistake a second gather between forward and backward for an in-place change
    """

    name: str
    parameter: nn.Parameter
    number: int
    whole: Tensor
    target: Tensor
    num_bytes: int
    version: int = -1
    gather: Collective | None = None


class GatheredWeights:
    """The `WeightSource` that gathers and frees weights as a `GatherPlan` decides."""

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        lane: Lane,
        sink: GradientSink,
        *,
        prefetch: int,
        gathered_bytes: int,
    ) -> None:
        self._lane, self._sink = lane, sink
        self._plan = _C.GatherPlan(num_prefetched=prefetch, budget_bytes=gathered_bytes)
        self._weights = [self._make(p) for p in parameters]
        self._by_parameter = {id(w.parameter): w for w in self._weights}
        self._aliases = WeakTensorKeyDictionary()
        self._held: Sequence[Weight] = ()  # those that the running node of backward uses

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Returns None, so that a copy of a module gathers its weights itself."""

    @property
    def num_mispredictions(self) -> int:
        """How often a step used weights in another order than was predicted for it."""
        return self._plan.num_mispredictions

    def gathered_storages(self) -> list[torch.UntypedStorage]:
        """Returns the storage of every weight; it is empty while the weight is not gathered."""
        return [w.whole.untyped_storage() for w in self._weights]

    def gather(self, parameter: nn.Parameter) -> Tensor:
        """See `WeightSource`."""
        weight = self._by_parameter.get(id(parameter))
        if weight is None:
            raise ValueError(
                "Orchestrator: a module came with another weight than its own parameter, as under "
                "torch.func.functional_call, which is supported without an Orchestrator only"
            )
        if torch.is_grad_enabled() and parameter.requires_grad:
            alias: Tensor = _Gathered.apply(parameter, weight, self._sink)
            if not in_backward():  # a recomputed forward gets no separate gradient
                self._sink.expect(parameter)
        else:
            alias = weight.whole.data
        self._aliases[alias] = weight
        return alias

    def apply(
        self,
        weights: Sequence[Tensor],
        function: Callable[..., Tensor],
        *,
        saves_weights: bool = True,
    ) -> Tensor:
        """See `WeightSource`."""
        # A weight that did not come from `gather` has no alias.
        gathered = [self._aliases[weight] for weight in weights if weight in self._aliases]
        self._acquire(gathered, _phase())
        try:
            y = function(*weights)
        finally:
            self._release(gathered)
        if gathered and saves_weights and y.requires_grad:
            versions = [weight.parameter._version for weight in gathered]
            y.register_hook(partial(self._before_backward, gathered, versions))
        return y

    def end_backward(self) -> None:
        """Releases the weights of a backward pass's last node, which has run."""
        held, self._held = self._held, ()
        self._release(held)

    def end_pass(self) -> None:
        """See `Orchestrator.end_pass`."""
        self.end_backward()
        self._plan.end_pass()

    def end_step(self) -> None:
        """Frees all gathered weights, because the parameters are about to change."""
        self.end_backward()
        self._carry_out(self._plan.end_step())

    def _make(self, p: ShardedParameter) -> Weight:
        rows, *rest = p.parameter.shape
        whole = torch.empty(
            (rows * p.grid.size("z"), *rest), dtype=p.parameter.dtype, device=p.parameter.device
        )
        storage = whole.untyped_storage()
        weight = Weight(
            name=p.name, parameter=p.parameter, number=self._plan.add_weight(storage.nbytes()),
            whole=whole, target=whole.data, num_bytes=storage.nbytes(),
        )  # fmt: skip
        storage.resize_(0)
        return weight

    def _before_backward(
        self, weights: Sequence[Weight], versions: Sequence[int], _: Tensor
    ) -> None:
        """Brings the weights back right before the backward node that uses them runs."""
        for weight, version in zip(weights, versions, strict=True):
            if weight.parameter._version != version:
                raise RuntimeError(
                    f"{weight.name} was changed in place between forward and backward, which would "
                    "now use the new value; step the optimizer after backward"
                )
        self._sink.backward_runs()
        self.end_backward()
        self._acquire(weights, _C.Phase.BACKWARD)
        self._held = weights

    def _acquire(self, weights: Sequence[Weight], phase: _C.Phase) -> None:
        for weight in weights:
            self._carry_out(self._plan.use(weight.number, phase), _PHASE_NAMES[phase])
        for weight in weights:
            self._finish(weight)
            if weight.version != weight.parameter._version:  # the parameter has changed since
                self._start_gather(weight, _PHASE_NAMES[phase])
                self._finish(weight)

    def _release(self, weights: Sequence[Weight]) -> None:
        for weight in weights:
            self._carry_out(self._plan.release(weight.number))

    def _finish(self, weight: Weight) -> None:
        if weight.gather is not None:
            weight.gather.wait()

    def _carry_out(self, actions: Sequence[_C.GatherAction], phase: str = "") -> None:
        for action in actions:
            weight = self._weights[action.weight]
            storage = weight.whole.untyped_storage()
            if action.kind == _C.ActionKind.FREE:
                self._finish(weight)
                weight.gather = None
                storage.resize_(0)
            else:
                storage.resize_(weight.num_bytes)
                self._start_gather(weight, phase)

    def _start_gather(self, weight: Weight, phase: str) -> None:
        weight.version = weight.parameter._version
        shard = weight.parameter.detach().contiguous()
        weight.gather = self._lane.all_gather(weight.target, shard, f"{weight.name} for {phase}")


class _Gathered(torch.autograd.Function):
    """The whole weight, whose gradient goes to the sink instead of the parameter's accumulator."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, weight: Weight, sink: GradientSink) -> Tensor:
        ctx.parameter, ctx.sink = weight.parameter, sink
        return weight.whole.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.sink.take(ctx.parameter, gradient)
        return None, None, None


def _phase() -> _C.Phase:
    if in_backward():
        return _C.Phase.BACKWARD
    return _C.Phase.FORWARD if torch.is_grad_enabled() else _C.Phase.INFERENCE
