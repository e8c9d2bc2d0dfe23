"""`--grid auto`: the grid that the planner finds fastest for the rest of the configuration."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import torch

from axonn_ext.calibrate.find_machine import find_machine, measured_file
from axonn_ext.launch.process import this_process
from axonn_ext.planner.files import is_file
from axonn_ext.planner.machine import MEASURED, Machine
from axonn_ext.planner.search import Request, plan
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.parallel import Overlap
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config import Config
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
    """The grid, what the planner expects of it, and of which machine; note: why of that one."""

    grid: GridShape
    step_time_s: float
    machine: str
    num_grids: int
    note: str = ""

    def describe(self) -> str:
        """One line for the user."""
        return (
            f"grid auto: {self.grid.short()}, predicted {self.step_time_s * 1e3:,.3g} ms a step on "
            f"machine {self.machine}, the fastest of {self.num_grids} grids that fit"
            f"{self.note and f' ({self.note})'}"
        )


def choose_grid(config: Config, *, world_size: int, machine: str | None) -> Choice:
    """The fastest grid of `world_size` ranks; all but the grid stays as configured.

    machine: a name or file; None: see `machine_here`.

    Raises: UserError, saying what would fit, if no grid does.
    """
    if config.model.implementation == "plain":
        raise UserError(
            "--grid auto: model.implementation plain runs in one process; use --grid x=1"
        )
    try:
        if machine is not None:
            asked, note = find_machine(machine), ""
        else:
            asked, note = machine_here(device_of(config), config.train.dtype, world_size)
        result = plan(make_request(config, world_size, asked))
    except ValueError as error:
        raise UserError(f"--grid auto: {error}") from None
    best = result.configs[0]
    return Choice(best.job.grid, best.step_time_s, machine or asked.name, result.fits, note)


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
        model=model,
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


def machine_here(device: str, dtype: str, world_size: int) -> tuple[Machine, str]:
    """What `axonn-ext bench links` measured here, if that is of such a job; else a known machine
    with such devices, or a generic one, each with the memory that there is. And a note for the
    user, "" if the machine is the measured one. Raises PlannerError for a file that is wrong.
    """
    notes = []
    file = measured_file()
    if file is not None and is_file(file):
        measured = find_machine(MEASURED)
        problem = _mismatch(measured, device, dtype, world_size)
        if not problem:
            return measured, ""
        notes.append(f"not the measured one, which {problem}")
    gpu = "" if device == "cpu" else torch.cuda.get_device_name(0)
    name = machine_of_gpu(gpu) if gpu else _CPUS
    if name in (_CPUS, _OTHER_GPUS):
        notes.insert(0, f"a generic machine: {gpu} is not known" if gpu else "a generic machine")
    here = this_process()
    ranks = world_size if here is None else here.local_world_size
    return _with_memory(find_machine(name), _memory_bytes(device, ranks)), "; ".join(notes)


def _mismatch(measured: Machine, device: str, dtype: str, world_size: int) -> str:
    """Why a job cannot be planned for what was measured; "" if it can."""
    if measured.device != device:
        return f"is of {measured.device}, not {device}"
    if dtype not in measured.peak_flops:
        return f"has {' and '.join(measured.peak_flops)}, not {dtype}"
    if measured.max_ranks is not None and measured.max_ranks < world_size:
        return f"has {measured.max_ranks} ranks, not {world_size}"
    return ""


def _memory_bytes(device: str, ranks_here: int) -> int:
    """Of a rank, of so many on this host."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_here


def _with_memory(machine: Machine, memory_bytes: int) -> Machine:
    """The same machine with that memory; of a smaller one, no larger share is reserved."""
    share = min(1.0, memory_bytes / machine.memory_bytes)
    return dataclasses.replace(
        machine, memory_bytes=memory_bytes,
        memory_reserved_bytes=int(machine.memory_reserved_bytes * share),
    )  # fmt: skip


def machine_of_gpu(gpu: str) -> str:
    """The known machine that has such GPUs; gpu: as the driver names them."""
    return next((name for part, name in _MACHINES_OF_GPUS.items() if part in gpu), _OTHER_GPUS)
