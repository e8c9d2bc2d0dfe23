"""`--grid auto`: the grid that the planner finds fastest for the rest of the configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from axonn_ext import settings
from axonn_ext.planner.grid import GridSize
from axonn_ext.planner.machine import MEASURED, Machine, load_machine
from axonn_ext.planner.model import Model
from axonn_ext.planner.options import Overlap
from axonn_ext.planner.search import Request, plan
from axonn_ext.train.config import Config
from axonn_ext.train.errors import UserError
from axonn_ext.train.job import device_of, vocabulary_and_model

# By what their names contain, the first that does.
_MACHINES_OF_GPUS = {
    "GH200": "alps",
    "A100-SXM4-40GB": "perlmutter",
    "H200": "dgx-h200",
    "H100": "dgx-h100",
    "A100": "dgx-a100",
    "MI250": "frontier",
}
_OTHER_GPUS, _CPUS = "ethernet", "host"


@dataclass(frozen=True)
class Choice:
    """The grid, what the planner expects of it, and of which machine."""

    grid: GridSize
    step_time_s: float
    machine: str
    num_grids: int

    def describe(self) -> str:
        """One line for the user."""
        return (
            f"grid auto: {self.grid.short()}, predicted {self.step_time_s * 1e3:,.3g} ms a step on "
            f"machine {self.machine}, the fastest of {self.num_grids} grids that fit"
        )


def choose_grid(config: Config, *, world_size: int, machine: str | None) -> Choice:
    """The fastest grid of `world_size` ranks; all but the grid stays as configured.

    machine: a name or file; None: what was measured here, else one of the same kind of device.

    Raises: UserError, saying what would fit, if no grid does.
    """
    if config.model.implementation == "plain":
        raise UserError(
            "--grid auto: model.implementation plain runs in one process; use --grid x=1"
        )
    if world_size < 1:
        raise UserError(f"--nproc: expected a whole number >= 1, got {world_size}")
    name = machine or default_machine(device_of(config))
    measured = Path(settings.load().measured_machine)
    try:
        request = make_request(config, world_size, load_machine(name, this_file=measured))
        result = plan(request)
    except ValueError as error:
        raise UserError(f"--grid auto: {error}") from None
    best = result.configs[0]
    return Choice(best.job.grid, best.step_time_s, name, result.fits)


def make_request(config: Config, world_size: int, machine: Machine) -> Request:
    """Nothing but the grid is searched. Raises ValueError for options that exclude each other."""
    config.parallel_config()
    _, model = vocabulary_and_model(config)
    train, parallel, overlap = config.train, config.parallel, config.overlap
    # at_once waits for each collective, but holds the same memory and issues the same ones.
    carried = Overlap(
        overlap.prefetch, overlap.gathered_bytes, overlap.deferred, overlap.bucket_bytes
    )
    return Request(
        model=Model(**{f.name: getattr(model, f.name) for f in dataclasses.fields(Model)}),
        model_name="the model",
        num_ranks=world_size,
        machine=machine,
        batch_size=train.batch_size,
        dtype=train.dtype,
        layouts=(parallel.layout,),
        fixed={
            "heads_over_y": parallel.heads_over_y,
            "save_gathered": parallel.save_gathered,
            "reshard_after_forward": parallel.reshard_after_forward,
            "recompute": parallel.recompute,
            "overlap": None if overlap.mode == "off" else carried,
        },
        micro_batches=(train.micro_batches,),
        top=1,
    )


def default_machine(device: str) -> str:
    """What was measured here, or else the known machine that has such devices."""
    measured = settings.load().measured_machine
    if measured and Path(measured).is_file():
        return MEASURED
    if device == "cpu":
        return _CPUS
    return machine_of_gpu(torch.cuda.get_device_name())


def machine_of_gpu(gpu: str) -> str:
    """The known machine that has such GPUs; gpu: as the driver names them."""
    return next((name for part, name in _MACHINES_OF_GPUS.items() if part in gpu), _OTHER_GPUS)
