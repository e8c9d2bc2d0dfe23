"""`--grid auto`: has the planner choose the fastest grid for the rest of the configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from axonn_ext.calibrate.find_machine import find_machine, machine_of_gpu, measured_file
from axonn_ext.kernels import host
from axonn_ext.planner.machines.machine import MEASURED, Machine
from axonn_ext.planner.search.fastest import plan
from axonn_ext.planner.search.request import SEARCHED, Request
from axonn_ext.ranks.launch.process import this_process
from axonn_ext.spec.files.files import is_file
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config import Config
from axonn_ext.train.corpora import sources_of, text_and_model
from axonn_ext.train.job import device_of

_OTHER_GPUS, _CPUS = "ethernet", "host"


@dataclass(frozen=True)
class Choice:
    """The chosen grid, the planner's estimate for it, and the machine the estimate assumes.

    note: tells the user why this machine is assumed.
    """

    grid: GridShape
    step_time_s: float
    machine: str
    num_grids: int
    note: str = ""

    def describe(self) -> str:
        """Returns one line for the user."""
        return (
            f"grid auto: {self.grid.short()}, predicted {self.step_time_s * 1e3:,.3g} ms a step on "
            f"machine {self.machine}, the fastest of {self.num_grids} grids that fit"
            f"{self.note and f' ({self.note})'}"
        )


def choose_grid(config: Config, *, world_size: int, machine: str | None) -> Choice:
    """Returns the fastest grid of `world_size` ranks; everything but the grid stays as configured.

    machine: name or file of a machine; None: the result of `machine_here`.

    Raises: UserError, which says what would fit, if no grid fits.
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
    """Returns a planner request that searches only over grids.

    Raises ValueError for incompatible sizes.
    """
    _, model = text_and_model(config, sources_of(config))
    train, parallel = config.train, config.parallel
    return Request(
        model=config.at_length(model),
        model_name="the model",
        num_ranks=world_size,
        machine=machine,
        batch_size=train.batch_size,
        dtype=train.dtype,
        layouts=(parallel.layout,),
        fixed={name: getattr(parallel, name) for name in SEARCHED}
        | {"overlap": config.overlap_options()},
        micro_batches=(train.micro_batches,),
        optimizers=(config.optim,),
        top=1,
    )


def machine_here(device: str, dtype: str, world_size: int) -> tuple[Machine, str]:
    """Returns the machine to plan for, and a note for the user.

    If `axonn-ext bench links` measured this machine for such a job, it is that one, and the note is
    "". Otherwise it is a known machine with such devices, or a generic one, with the memory of this
    host. Raises InputError if the measured machine's file is invalid.
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
    name = (machine_of_gpu(gpu) or _OTHER_GPUS) if gpu else _CPUS
    if name in (_CPUS, _OTHER_GPUS):
        notes.insert(0, f"a generic machine: {gpu} is not known" if gpu else "a generic machine")
    here = this_process()
    ranks = world_size if here is None else here.local_world_size
    return _with_memory(find_machine(name), _memory_bytes(device, ranks)), "; ".join(notes)


def _mismatch(measured: Machine, device: str, dtype: str, world_size: int) -> str:
    """Returns why the measured machine does not fit such a job; "" if it does."""
    if measured.device != device:
        return f"is of {measured.device}, not {device}"
    if dtype not in measured.peak_flops:
        return f"has {' and '.join(measured.peak_flops)}, not {dtype}"
    if measured.max_ranks is not None and measured.max_ranks < world_size:
        return f"has {measured.max_ranks} ranks, not {world_size}"
    return ""


def _memory_bytes(device: str, ranks_here: int) -> int:
    """Returns the memory available to each of `ranks_here` ranks on this host."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return host.memory_bytes() // ranks_here


def _with_memory(machine: Machine, memory_bytes: int) -> Machine:
    """Returns the same machine with the given memory.

    If this is less memory, the reserved part shrinks in proportion.
    """
    share = min(1.0, memory_bytes / machine.memory_bytes)
    return dataclasses.replace(
        machine, memory_bytes=memory_bytes,
        memory_reserved_bytes=int(machine.memory_reserved_bytes * share),
    )  # fmt: skip
