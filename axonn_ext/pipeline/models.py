"""The models that a pipeline runs: the stages of a transformer, or of a list of modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_ext.models.checks import check_labels
from axonn_ext.models.transformer import Transformer
from axonn_ext.nn import Places
from axonn_ext.nn.loss import IGNORE_INDEX
from axonn_ext.nn.sharded import (
    ParameterSpec,
    declaration_of,
    declare,
    own_rows,
    rows_over,
    sharded_parameters,
)
from axonn_ext.pipeline.totals import Totals
from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.stages import Stages


class StagedModel(Protocol):
    """This rank's stages of a model.

    table: the embedding's table if the head is tied to it and this rank holds it, as both ends of
    the pipeline do; else None.
    """

    stages: Stages
    table: nn.Parameter | None

    @property
    def module(self) -> nn.Module:
        """The modules of this rank's stages."""
        ...

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """The axes over which losses must be summed, besides pipe."""
        ...

    def prepare(
        self, micro_batches: Sequence[Any], num_labels: float | None, totals: Totals
    ) -> Sequence[Any]:
        """Converts the user's micro-batches to those that `run` takes. Every rank has all of them.

        num_labels: the divisor of the loss; None: the usual one for the model.

        Raises ValueError for micro-batches that the model does not take.
        """
        ...

    def run(self, stage: int, x: Tensor | None, micro_batch: Any) -> Tensor:
        """Returns a virtual stage's output for x; the last one returns this rank's loss part."""
        ...

    def pack(self, tensor: Tensor, micro_batch: Any) -> Tensor:
        """Returns this rank's part to send of a stage's output, or of its gradient."""
        ...

    def unpack(self, part: Tensor, micro_batch: Any) -> Tensor:
        """Returns the whole tensor; the peers on this stage have received the other parts."""
        ...


@dataclass(frozen=True)
class MicroBatch:
    """The sequences of a (data, z) group, equal on all ranks of x, y and pipe.

    token_ids, labels: [B, S]; a label of -100 is none. places: as in Transformer.loss.
    """

    token_ids: Tensor
    labels: Tensor
    places: Places | None = None


class TransformerStages:
    """The stages of a model of axonn_ext.models."""

    def __init__(self, model: Transformer) -> None:
        self.module: Transformer = model
        self.stages = model.stages
        on_ends = (p.parameter for p in sharded_parameters(model) if p.spec.on_ends)
        self.table = next(on_ends, None)
        self.loss_axes = rows_over(model.parallel.layout, "y")
        self._grid = model.grid
        # In "replicated" the ranks of x have equal activations, and each sends a part.
        self._shares_x = model.parallel.layout == "replicated" and model.grid.size("x") > 1

    def prepare(
        self, micro_batches: Sequence[Any], num_labels: float | None, totals: Totals
    ) -> Sequence[Any]:
        for number, each in enumerate(micro_batches):
            if not isinstance(each, MicroBatch):
                raise TypeError(
                    f"Pipeline: micro_batches[{number}] must be a MicroBatch, got "
                    f"{type(each).__name__}"
                )
            check_labels(each.labels, each.token_ids, self.module.config, self._grid.rank)
        if num_labels is None:
            count = sum((each.labels != IGNORE_INDEX).sum() for each in micro_batches)
            assert isinstance(count, Tensor)
            num_labels = totals.sum(count, ("z", "data"), "labels").item()
        return [(each, num_labels) for each in micro_batches]

    def run(self, stage: int, x: Tensor | None, micro_batch: Any) -> Tensor:
        batch, num_labels = micro_batch
        y = self.module.run_stage(stage, x, batch.token_ids, batch.places)
        if stage < self.stages.num_virtual - 1:
            return y
        return self.module.share_of_loss(y, batch.labels, num_labels)

    def pack(self, tensor: Tensor, micro_batch: Any) -> Tensor:
        if not self._sends_a_part(micro_batch):
            return tensor
        axis = self._grid.axis("x")
        return own_rows(tensor, axis.rank, axis.size)

    def unpack(self, part: Tensor, micro_batch: Any) -> Tensor:
        if not self._sends_a_part(micro_batch):
            return part
        return collectives.all_gather(part, self._grid.axis("x"))

    def _sends_a_part(self, micro_batch: Any) -> bool:
        return self._shares_x and micro_batch[0].token_ids.numel() % self._grid.size("x") == 0


# A module, or a function that makes it, so that a rank need not make the modules of other stages.
Layer = nn.Module | Callable[[], nn.Module]
Loss = Callable[[Tensor, Any], Tensor]


class ModuleStages:
    """The stages of a list of modules, each of which takes the output of the one before it.

    A micro-batch is (inputs, targets): the first module takes the inputs; `loss` takes the last
    module's output and the targets. The loss of a step is the mean over micro-batches and (data, z)
    groups. Modules not of axonn_ext are replicated on every rank of their stage, and start with the
    values of its first rank.
    """

    loss_axes = ("z", "data")
    table: nn.Parameter | None = None

    def __init__(self, layers: Sequence[Layer], grid: Grid, stages: Stages, loss: Loss) -> None:
        if stages.num_blocks != len(layers):
            raise ValueError(
                f"Pipeline: stages must have the {len(layers)} modules, got {stages.num_blocks}"
            )
        self.stages, self._loss = stages, loss
        self._parts = grid.num_parts(("z", "data"))
        self.module = nn.ModuleList()  # named by their number in the list
        for number in (n for s in stages.on(grid.axis("pipe").rank) for n in stages.blocks[s]):
            layer = layers[number]
            module = layer if isinstance(layer, nn.Module) else layer()
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"Pipeline: layer {number} must be a Module, or a function that returns one, "
                    f"got {type(module).__name__}"
                )
            self.module.add_module(str(number), module)
        _refuse_shared(layers)
        _make_equal(_declare_plain(self.module, grid), grid)

    def prepare(
        self, micro_batches: Sequence[Any], num_labels: float | None, totals: Totals
    ) -> Sequence[Any]:
        if num_labels is not None:
            raise ValueError("Pipeline: num_labels is for transformers, got a list of modules")
        for number, each in enumerate(micro_batches):
            if not isinstance(each, Sequence) or len(each) != 2:
                raise TypeError(
                    f"Pipeline: micro_batches[{number}] must be (inputs, targets), got "
                    f"{type(each).__name__}"
                )
        return [(*each, len(micro_batches) * self._parts) for each in micro_batches]

    def run(self, stage: int, x: Tensor | None, micro_batch: Any) -> Tensor:
        inputs, targets, divisor = micro_batch
        y = inputs if x is None else x
        for number in self.stages.blocks[stage]:
            y = self.module.get_submodule(str(number))(y)
        if stage < self.stages.num_virtual - 1:
            return y
        return self._loss(y, targets) / divisor

    def pack(self, tensor: Tensor, micro_batch: Any) -> Tensor:
        return tensor

    def unpack(self, part: Tensor, micro_batch: Any) -> Tensor:
        return part


def _refuse_shared(layers: Sequence[Layer]) -> None:
    """Raises ValueError if a parameter is in two modules, which may be on two stages."""
    owners: dict[int, int] = {}
    for number, layer in enumerate(layers):
        for parameter in layer.parameters() if isinstance(layer, nn.Module) else ():
            if owners.setdefault(id(parameter), number) != number:
                raise ValueError(
                    f"Pipeline: layers {owners[id(parameter)]} and {number} share a parameter, "
                    "which two stages cannot"
                )


def _declare_plain(module: nn.Module, grid: Grid) -> list[nn.Module]:
    """Declares the parameters of modules not of axonn_ext as replicated over x and y.

    Their gradients are summed over z and data, whose ranks have different rows. Returns the
    modules that have such parameters, and those that have only buffers. Raises ValueError for
    modules that are on another grid.
    """
    plain = []
    for owner in module.modules():
        own = {name: p for name, p in owner._parameters.items() if p is not None}
        declared = declaration_of(owner)
        if declared is not None and declared.grid is not grid:
            raise ValueError(f"Pipeline: a {type(owner).__name__} is on another grid already")
        if own and declared is None:
            specs = {n: ParameterSpec(tuple(p.shape), {}, ("z", "data"), None)
                     for n, p in own.items()}  # fmt: skip
            declare(owner, grid, specs)
            plain.append(owner)
        elif not own and owner._buffers:
            plain.append(owner)
    return plain


@torch.no_grad()
def _make_equal(modules: Sequence[nn.Module], grid: Grid) -> None:
    """Copies the first rank's values to all ranks of a stage, which may have drawn different ones.

    Collectives: a broadcast of each tensor over x, y, z and data.
    """
    for module in modules:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            for axis in ("x", "y", "z", "data"):
                if grid.size(axis) > 1:
                    dist.broadcast(tensor.detach(), group=grid.group(axis), group_src=0)
