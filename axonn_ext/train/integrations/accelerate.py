"""An Accelerator of Hugging Face Accelerate that splits models by a grid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from axonn_ext.ranks.grid import Grid
from axonn_ext.spec import settings
from axonn_ext.train.integrations.placed import PlacedModels
from axonn_ext.train.integrations.sizes import make_grid

_LAUNCHES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_PRECISIONS = ("no", "bf16")


class AxonnAccelerator(Accelerator):
    """Trains like Accelerator on several processes, with Linears split by a grid.

        accelerator = AxonnAccelerator(x=2, y=2, gradient_accumulation_steps=2)

    A script needs no other change than this. (Accelerate has no registry of strategies, so this is
    a class in place of a plugin.) `prepare` gives each process its own rows, as ever, and splits
    models in place, with rank 0's values; see `auto_parallelize`. After
    `accelerator.backward`, gradients are the mean over all ranks of the gradient of each rank's
    loss, as with DistributedDataParallel, also with `accumulate` and `no_sync`.

    `save_state` and `save_model` write whole tensors, which another grid or a plain script can
    load. `state_dict()` of a model or an optimizer also gathers, so all ranks must call it.

    Args:
        x, y, z: sizes of the grid.
        data: likewise; default the number of processes / (x y z).
        accelerator_options: passed to Accelerator, which has some twenty.

    Collectives: in `prepare` those of PlacedModels.place, in forward and backward those of
    RowLinear, and after backward those of sync_gradients.

    Raises:
        ValueError: the sizes do not suit the number of processes; mixed_precision is neither "no"
            nor "bf16"; another way to split models (such as FSDP) is configured; Accelerate does
            not see the processes that were started, as on CPUs without cpu=True.
    """

    def __init__(
        self,
        x: int = 1,
        y: int = 1,
        z: int = 1,
        data: int | None = None,
        **accelerator_options: Any,
    ) -> None:
        super().__init__(**accelerator_options)
        if self.mixed_precision not in _PRECISIONS:
            raise ValueError(
                f"AxonnAccelerator: mixed_precision must be one of {', '.join(_PRECISIONS)}, got "
                f"{self.mixed_precision!r}"
            )
        if self.distributed_type not in _LAUNCHES or self.parallelism_config is not None:
            raise ValueError(
                "AxonnAccelerator: the grid is the only way to split a model here, but Accelerate "
                f"is configured for {self.distributed_type} and {self.parallelism_config}"
            )
        launched = settings.launch_environment()
        if launched is not None and launched.world_size != self.num_processes:
            raise ValueError(
                f"AxonnAccelerator: {launched.world_size} processes were started, but Accelerate "
                f"sees {self.num_processes}; to train on CPUs, pass cpu=True"
            )
        if not dist.is_initialized():  # Accelerate leaves a single process without a group
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        grid = make_grid("AxonnAccelerator", x, y, z, data)
        self._on_grid = PlacedModels(
            grid, what="AxonnAccelerator", fix="accelerator.backward(loss)"
        )

    @property
    def grid(self) -> Grid:
        """The grid of all processes."""
        return self._on_grid.grid

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        is_new = not getattr(model, "_is_accelerate_prepared", False)
        # In this mode Accelerate does everything except wrap the model.
        prepared: nn.Module = super().prepare_model(
            model, device_placement=device_placement, evaluation_mode=True
        )
        if is_new and not evaluation_mode:
            self._on_grid.place(model)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            self._on_grid.attach(optimizer)
        prepared: torch.optim.Optimizer = super().prepare_optimizer(optimizer, device_placement)
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        with self._on_grid.backward():
            super().backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with self._on_grid.no_sync(self.unwrap_model(model)):
            yield

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        chosen = [parameters] if isinstance(parameters, Tensor) else parameters
        return self._on_grid.clip_grad_norm_(chosen, max_norm, norm_type=norm_type)
