"""Weight gradients of Linears that are computed on request instead of during backward.

Backward then computes only what the layers below wait for. Legend as in linear.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from axonn_ext.nn.linear import Linear, ProductOptions


class DeferredWeightGradients:
    """Computes the weight gradients of Linears on request instead of during backward.

        deferred = DeferredWeightGradients(model)
        with deferred.collecting() as weight_gradients:
            loss = model.loss(micro_batch)
        loss.backward()            dx of every Linear, and all gradients of everything else
        weight_gradients.run()     dW and db of every Linear, the last one first

    It applies to Linears whose weight requires a gradient when they are called; bias gradients come
    with the weight's. Adapters, norms and embeddings get theirs in backward. If a Linear is tied to
    an embedding, backward adds the embedding's part to `grad` and `run` the Linear's, each with a
    separate reduce-scatter over z.

    Gradients are bitwise the same as without, except for sums in a different order: of the parts of
    a tied weight; perhaps of dx over r with algorithm "chunked"; and over more than two ranks in an
    Orchestrator's buckets, which are filled in a different order. In layout "sharded" dy is
    gathered over s twice, once in backward and once in `run`.

    Forward passes may be collected before earlier ones have run. A forward pass that a checkpoint
    (use_reentrant=False) recomputes in backward belongs to the pass that it repeats; nothing is
    deferred within a checkpoint with use_reentrant=True or with gradients disabled. With an
    Orchestrator, `run` counts as a backward pass: wrap all but the last of a step in `no_sync`.

    Raises ValueError if a Linear in `module` belongs to another DeferredWeightGradients.
    Source: arXiv:2401.10241, section 2.
    """

    def __init__(self, module: nn.Module) -> None:
        found = [(name, m) for name, m in module.named_modules() if isinstance(m, Linear)]
        for name, linear in found:
            if linear.deferral is not None:
                raise ValueError(
                    f"DeferredWeightGradients: {name or 'the module'} belongs to another one "
                    "already; close that one first"
                )
        self._linears = [linear for _, linear in found]
        self._current: WeightGradients | None = None
        self._is_open = True
        for linear in self._linears:
            linear.deferral = self

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Returns None, so that a copy of a module computes all gradients in backward."""

    @contextmanager
    def collecting(self) -> Iterator[WeightGradients]:
        """Wraps one forward pass, and yields the weight gradients that it defers.

        Raises RuntimeError within another `collecting`, or after `close`.
        """
        if not self._is_open:
            raise RuntimeError("DeferredWeightGradients: collecting was called after close")
        if self._current is not None:
            raise RuntimeError("DeferredWeightGradients: a forward pass is being collected already")
        self._current = WeightGradients()
        try:
            yield self._current
        finally:
            self._current = None

    def close(self) -> None:
        """Makes the Linears compute all gradients in backward again.

        Collected weight gradients can still run.
        """
        if self._is_open:
            for linear in self._linears:
                linear.deferral = None
        self._is_open, self._current = False, None

    def multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, options: ProductOptions
    ) -> Tensor | None:
        """Returns a Linear's product while `collecting`, else None; Linears call it."""
        # A checkpoint keeps only the saved tensors of its recomputation, which are those of the
        # ordinary node, so there the Linear computes as usual.
        if self._current is None or in_backward():
            return None
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return None
        return self._current.multiply(x, weight, bias, options)


class WeightGradients:
    """The weight gradients of one forward pass; made by `DeferredWeightGradients.collecting`."""

    def __init__(self) -> None:
        self._calls: list[tuple[_Call, Tensor]] = []
        self._has_run = False

    @property
    def num_bytes(self) -> int:
        """The bytes of memory kept until `run`: the inputs and the gradients dy.

        Shared memory counts once. 0 before backward and after `run`.
        """
        held = [t for call, _ in self._calls for t in (call.x, call.dy) if t is not None]
        storages = [t.untyped_storage() for t in held]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def run(self) -> None:
        """Computes the gradients and adds them to `grad`, or passes them to an Orchestrator.

        Call it once, after the backward pass. A Linear that backward did not reach gets no
        gradient. Collectives for each Linear, in the same order on all ranks: all-gathers of dy
        over s and of x over r (layout "sharded"; of x only without save_gathered), reduce-scatter
        of dW over z.

        Raises RuntimeError if backward has not run, if `run` was called before, or if an input or a
        dy was changed in place after backward.
        """
        if self._has_run:
            raise RuntimeError("WeightGradients.run: was called before; it can run once")
        ready = [(call, trigger) for call, trigger in self._calls if call.dy is not None]
        if self._calls and not ready:
            raise RuntimeError(
                f"WeightGradients.run: none of the {len(self._calls)} Linears of this forward pass "
                "has a gradient of its output; run backward first"
            )
        for call, _ in ready:
            call.check_unchanged()
        for call, _ in self._calls:
            call.is_closed = True
        self._has_run, self._calls = True, []
        if ready:
            triggers = [trigger for _, trigger in ready]
            torch.autograd.backward(triggers, [torch.empty_like(t) for t in triggers])

    def multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, options: ProductOptions
    ) -> Tensor:
        """Returns the product; its graph contains x, but neither the weight nor the bias.

        These get their gradients through a separate graph, which `run` starts.
        """
        x, weight = _as_autocast(x), _as_autocast(weight)
        bias = None if bias is None else _as_autocast(bias)
        call = _Call(options, weight.shape)
        # Something must require a gradient, so that backward reaches this node and leaves dy.
        anchor = None if x.requires_grad else x.new_empty(0).requires_grad_()
        y: Tensor = _Product.apply(x, anchor, _Operands(weight, bias), call)
        trigger: Tensor = _WeightGradient.apply(weight, bias, call)
        self._calls.append((call, trigger))
        return y


class _Call:
    """One call of a Linear: the tensors that backward leaves for the weight gradient."""

    def __init__(self, options: ProductOptions, weight_shape: torch.Size) -> None:
        self.options = options
        gathers_x = options.sharded and options.group_sizes[0] > 1
        gathers_weight = options.group_sizes[2] > 1
        self.keeps_full_x = gathers_x and options.save_input
        self.keeps_full_weight = gathers_weight and options.save_weight
        self.x_is_full = not gathers_x or self.keeps_full_x
        self.weight_is_full = not gathers_weight or self.keeps_full_weight
        rows, features = weight_shape
        self.whole_weight_shape = (rows * options.group_sizes[2], features)
        self.x: Tensor | None = None
        self.dy: Tensor | None = None
        self.versions: tuple[int, int] | None = None
        self.is_closed = False

    def add(self, x: Tensor, dy: Tensor) -> None:
        """Keeps the inputs of the weight and bias gradients.

        After a second backward pass through the same graph, dy is the sum of both.
        """
        if self.is_closed:
            raise RuntimeError(
                "WeightGradients: backward came again, after run; run it after all backward passes"
            )
        # dy itself is kept, not a view: autograd adds to a gradient in place, or makes it a
        # parameter's grad, only if nothing else refers to it.
        self.x, self.dy = x.detach(), dy if self.dy is None else self.dy + dy
        self.versions = (self.x._version, self.dy._version)

    def check_unchanged(self) -> None:
        """Raises RuntimeError if x or dy was written to since."""
        assert self.x is not None and self.dy is not None
        if (self.x._version, self.dy._version) != self.versions:
            raise RuntimeError(
                "WeightGradients.run: the input of a Linear, or the gradient of its output, was "
                "changed in place after backward"
            )

    def take(self, mask: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
        """Returns dW and db, as far as the mask selects them, and drops x and dy."""
        assert self.x is not None and self.dy is not None
        x, dy, self.x, self.dy = self.x, self.dy, None, None
        # The weight may not be in memory, but only its shape and dtype matter.
        weight = x.new_empty(1).expand(self.whole_weight_shape)
        _, dweight, dbias = self._gradients(dy, x, weight, (False, *mask), weight_is_full=True)
        return dweight if mask[0] else None, dbias if mask[1] else None

    def input_gradient(self, dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Returns dx; `weight` is the one saved by forward."""
        mask = (True, False, False)
        return self._gradients(dy, x, weight, mask, weight_is_full=self.weight_is_full)[0]

    def _gradients(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        mask: tuple[bool, bool, bool],
        *,
        weight_is_full: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dx, dW and db; those not in the mask are empty."""
        names, sizes, sharded, gather_dim, scatter_dim, _, _, *chosen = self.options
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.axonn.linear_backward.default(
            dy, x, weight, self.x_is_full, weight_is_full, mask,
            names, sizes, sharded, gather_dim, scatter_dim, *chosen,
        )  # fmt: skip
        return found


class _Operands:
    """The operands of a product that are not inputs of its node."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias


class _Product(torch.autograd.Function):
    """A Linear's product; its node computes only the gradient of x.

    It saves the same tensors as the ordinary node, in the same order, because a checkpoint
    recomputes the pass with the ordinary node. anchor: see `WeightGradients.multiply`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor | None, operands: _Operands, call: _Call
    ) -> Tensor:
        weight, bias = operands.weight, operands.bias
        # Enable grad mode, because only then do ranks compare which operands require gradients.
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            y, full_x, full_weight = torch.ops.axonn.linear_forward.default(
                x, weight, bias, *call.options
            )
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            full_x if call.keeps_full_x else x, full_weight if call.keeps_full_weight else weight
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if dy is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        dx = ctx.call.input_gradient(dy, x, weight) if ctx.needs_input_grad[0] else None
        ctx.call.add(x, dy)
        return dx, None, None, None


class _WeightGradient(torch.autograd.Function):
    """An empty tensor; its backward computes the weight and bias gradients of a call."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        ctx.call = call
        return weight.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        return *ctx.call.take(ctx.needs_input_grad[:2]), None


def in_backward() -> bool:
    """Whether autograd's engine runs on this thread, as when a checkpoint is recomputed."""
    return torch._C._current_graph_task_id() != -1


def _as_autocast(t: Tensor) -> Tensor:
    """Returns the tensor as autocast would pass it to the op.

    Autocast is above autograd, so it does not apply to tensors saved by a Python node.
    """
    device = t.device.type
    if not torch.is_autocast_enabled(device) or t.dtype == torch.float64:
        return t
    return t.to(torch.get_autocast_dtype(device))
