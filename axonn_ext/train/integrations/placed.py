"""Models that frameworks train as with DistributedDataParallel, with their Linears on a grid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_ext.models.parallelize.agreement import agreement
from axonn_ext.models.parallelize.auto import WORLD_SUM, auto_parallelize
from axonn_ext.nn.sharded import ShardedParameter, sharded_parameters
from axonn_ext.optim.gradients import clip_sharded_, sync_gradients
from axonn_ext.ranks.grid import Grid
from axonn_ext.train.integrations.whole_state import make_model_whole, make_optimizer_whole


@dataclass
class _Status:
    """has_gradients: backward has added gradients that are not yet averaged over ranks."""

    has_gradients: bool = False
    accumulates: bool = False


class PlacedModels:
    """The models of one script, which each rank calls with its own rows of the batch.

    Gradients are those of DistributedDataParallel: the mean, over all ranks, of the gradient of
    each rank's loss. The backward of a 4D Linear already sums its weight gradient over some axes,
    so this sum is divided by the size of those axes and then averaged over the others. A mean of
    equal numbers is the same number, so already averaged gradients may stay and accumulate, as with
    DistributedDataParallel.

    what: the class that the script uses, for messages. fix: the call that replaces
    loss.backward().
    """

    def __init__(self, grid: Grid, *, what: str, fix: str) -> None:
        self.grid, self.what, self.fix = grid, what, fix
        self._in_backward = False
        # Weak, so that models dropped by the script are freed. In the order of `place`.
        self._placed: WeakKeyDictionary[nn.Module, _Status] = WeakKeyDictionary()

    def place(self, module: nn.Module) -> None:
        """Makes the Linears of a complete model 4D, in place, with rank 0's values on all ranks.

        The model's `state_dict` and `load_state_dict` then use whole tensors.

        Collectives: a broadcast of each parameter and buffer.

        Raises, on every rank:
            ValueError: the model is on a grid already, or has parameters without values.
            RuntimeError: ranks have different models.
        """
        with agreement(what=self.what) as facts:
            for name, tensor in _tensors(module):
                if tensor.is_meta:
                    raise ValueError(f"{self.what}: {name} is on the meta device: it has no values")
                facts[name] = f"{tensor.dtype} {list(tensor.shape)}"
        _broadcast(tensor for _, tensor in _tensors(module))
        with auto_parallelize(self.grid) as block:
            block.adopt(module)
        status = self._placed[module] = _Status()
        for p in sharded_parameters(module):
            self._watch(p, status)
        make_model_whole(module)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes an optimizer's `state_dict` and `load_state_dict` use whole tensors.

        Raises ValueError if it made steps before its model was placed.
        """
        owners = self._owners()
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                whole = isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape
                if whole and id(parameter) in owners:
                    raise ValueError(
                        f"{self.what}: the optimizer has made steps before its model was set up: "
                        f"its {key} of a parameter of shape {list(parameter.shape)} has shape "
                        f"{list(value.shape)}"
                    )
        make_optimizer_whole(optimizer, self._owners)

    def _watch(self, p: ShardedParameter, status: _Status) -> None:
        """Divides each contribution of backward by the number of ranks that it sums over."""
        num_summed = p.grid.num_parts(
            [axis for axis in WORLD_SUM if axis not in p.spec.summed_over]
        )

        def arrived(gradient: Tensor) -> Tensor:
            if not self._in_backward:
                raise RuntimeError(f"{self.what}: call {self.fix} in place of loss.backward()")
            status.has_gradients = True
            return gradient / num_summed if num_summed > 1 else gradient

        needs_grad = p.parameter.requires_grad  # a frozen parameter may be trained later
        p.parameter.requires_grad_(True).register_hook(arrived)
        p.parameter.requires_grad_(needs_grad)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Wraps the backward pass of a loss; averages the gradients at the end of the block.

        Skips models without new gradients and models inside `no_sync`. Collectives: those of
        sync_gradients.
        """
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False
        for module, status in list(self._placed.items()):
            if status.has_gradients and not status.accumulates:
                average_gradients(module)
                status.has_gradients = False

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Inside the block the model's gradients accumulate on each rank, without averaging."""
        if module not in self._placed:
            raise TypeError(f"{self.what}: the model was not set up, got {type(module).__name__}")
        status = self._placed[module]
        before, status.accumulates = status.accumulates, True
        try:
            yield
        finally:
            status.accumulates = before

    def clip_grad_norm_(
        self,
        parameters: Iterable[Tensor],
        max_norm: float,
        *,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scales gradients so that their norm over the whole model is at most `max_norm`.

        Returns the norm before clipping, an fp64 scalar, equal on every rank. Collectives: an
        all-reduce of one number over each of x, y and z.

        Raises:
            ValueError: max_norm is not positive; the norm is not the 2-norm; a parameter belongs to
                no model that was set up.
            RuntimeError: error_if_nonfinite is set, and the norm is not finite.
        """
        if float(norm_type) != 2.0:
            raise ValueError(f"{self.what}: norm_type must be 2, got {norm_type}")
        chosen, owners = list(parameters), self._owners()
        others = [p for p in chosen if id(p) not in owners]
        if others:
            raise ValueError(
                f"{self.what}: {len(others)} of {len(chosen)} parameters, the first of shape "
                f"{list(others[0].shape)}, belong to no model that was set up"
            )
        norm = clip_sharded_([owners[key] for key in dict.fromkeys(map(id, chosen))], max_norm)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"{self.what}: the norm of the gradients is {norm.item()}")
        return norm

    def _owners(self) -> dict[int, ShardedParameter]:
        """Returns the parameters of all models, by their ids."""
        return {id(p.parameter): p for module in self._placed for p in sharded_parameters(module)}


@torch.no_grad()
def average_gradients(module: nn.Module) -> None:
    """Averages each gradient over the axes that backward does not sum over."""
    for p in sharded_parameters(module):
        if p.parameter.grad is not None:
            p.parameter.grad.div_(p.grid.num_parts(p.spec.summed_over))
    sync_gradients(module)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@torch.no_grad()
def _broadcast(tensors: Iterable[Tensor]) -> None:
    """Broadcasts rank 0's values, as bytes, since gloo does not support all dtypes."""
    for tensor in tensors:
        if tensor.numel():
            values = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(values.view(-1).view(torch.uint8), src=0)
            tensor.copy_(values)
