"""A strategy for Lightning Fabric."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn

from axonn_ext.ranks.grid import Grid
from axonn_ext.spec import settings
from axonn_ext.train.integrations.placed import PlacedModels
from axonn_ext.train.integrations.sizes import make_grid


class AxonnStrategy(DDPStrategy):
    """Trains like Fabric's DDPStrategy, with the Linears of each model split by a grid.

        fabric = lightning.Fabric(accelerator="cpu", devices=4, strategy=AxonnStrategy(x=2, y=2))

    A script needs no other change than this. The samplers of its loaders are split over all ranks,
    and on each rank the model is called with that rank's rows; see `auto_parallelize`. After
    `fabric.backward`, except inside `fabric.no_backward_sync`, gradients are the mean over all
    ranks of the gradient of each rank's loss, as with DDPStrategy.

    Fabric's launcher starts the script again for each process, or torchrun starts all processes.

    `fabric.setup` splits the model in place, with rank 0's values. `fabric.save` writes whole
    tensors, which another grid or a plain script can load. `state_dict()` of the model or the
    optimizer also gathers, so all ranks must call it.

    Args:
        x, y, z: sizes of the grid.
        data: likewise; default the number of processes / (x y z).
        precision, cluster_environment, checkpoint_io: as in Fabric's own strategies.
        process_group_backend: default gloo for CPUs, NCCL for GPUs.
        timeout: how long ranks wait for each other; default AXONN_TIMEOUT_SECONDS.

    Collectives: in `fabric.setup` those of PlacedModels.place, in forward and backward those of
    RowLinear, and after backward those of sync_gradients.

    Raises, when Fabric launches:
        ValueError: the sizes do not suit the number of processes; the precision is not supported.
    """

    def __init__(
        self,
        x: int = 1,
        y: int = 1,
        z: int = 1,
        data: int | None = None,
        *,
        precision: Precision | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__(
            precision=precision,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            process_group_backend=process_group_backend,
            timeout=timeout or timedelta(seconds=settings.load().timeout_seconds),
        )
        self._sizes = (x, y, z, data)
        self._models: PlacedModels | None = None
        self._backward_sync_control = _NoSync(self)  # used by Fabric's no_backward_sync

    @property
    def models(self) -> PlacedModels:
        """The models that were set up. Raises RuntimeError before Fabric has launched."""
        if self._models is None:
            raise RuntimeError("AxonnStrategy: call fabric.launch() first")
        return self._models

    @property
    def grid(self) -> Grid:
        """The grid of all processes. Raises RuntimeError before Fabric has launched."""
        return self.models.grid

    def setup_environment(self) -> None:
        _check_precision(self.precision)
        super().setup_environment()
        grid = make_grid("AxonnStrategy", *self._sizes)
        self._models = PlacedModels(grid, what="AxonnStrategy", fix="fabric.backward(loss)")

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        if empty_init:
            raise ValueError(
                "AxonnStrategy: init_module(empty_init=True) is not supported: the model needs "
                "values when it is set up"
            )
        return super().module_init_context(empty_init)

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        self.models.place(module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self.models.attach(optimizer)
        return optimizer

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        with self.models.backward():
            super().backward(tensor, module, *args, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        parameters: Iterable[Tensor] = self.precision.main_params(optimizer)
        return self.models.clip_grad_norm_(
            parameters, max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers no name for `Fabric(strategy=...)`, since the strategy needs sizes."""


@dataclass(frozen=True)
class _NoSync(_BackwardSyncControl):
    strategy: AxonnStrategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self.strategy.models.no_sync(module) if enabled else nullcontext()


def _check_precision(plugin: Precision) -> None:
    """Raises ValueError for a precision that could make ranks with different blocks diverge."""
    if type(plugin) is MixedPrecision and plugin.scaler is not None:
        raise ValueError(
            f"AxonnStrategy: precision {plugin.precision!r} is not supported, since each rank "
            "would scale its loss by its own gradients; use 'bf16-mixed'"
        )
    if type(plugin) not in (Precision, DoublePrecision, HalfPrecision, MixedPrecision):
        raise ValueError(
            f"AxonnStrategy: precision {plugin.precision!r} ({type(plugin).__name__}) is not "
            "supported; use '32-true', '64-true', 'bf16-true', '16-true' or 'bf16-mixed'"
        )
