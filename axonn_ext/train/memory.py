"""Refuses jobs that cannot fit, by comparing the least that they need with the host's memory."""

from __future__ import annotations

import torch

from axonn_ext import _machine
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.job import Job

# On a rank that has it all. In fp32 these are weight, gradient and two moments; in bf16 and fp16,
# weight and gradient of two bytes each, and a master weight and two moments in fp32.
BYTES_OF_A_PARAMETER = 16
BYTES_OF_A_TOKEN = 16  # its id and its label, in int64


def device_bytes(device: str) -> int:
    """Returns the memory of all GPUs of this host, or of the host itself for "cpu"."""
    if device == "cuda":
        return sum(
            int(torch.cuda.get_device_properties(i).total_memory)
            for i in range(torch.cuda.device_count())
        )
    return _machine.memory_bytes()


def memory_problem(what: str, num_bytes: float, device: str) -> str:
    """Says why the ranks of this host cannot have that many bytes together; "" if they can."""
    there = device_bytes(device)
    if num_bytes <= there:
        return ""
    kind = "the GPUs here have" if device == "cuda" else "this machine has"
    return (
        f"{what} needs at least {num_bytes / 1e9:,.1f} GB of memory, {kind} {there / 1e9:,.1f} GB"
    )


def check_memory(job: Job, *, ranks_here: int) -> None:
    """Raises UserError for a job whose parameters and tokens alone do not fit this host.

    A job needs far more than that, so no job that fits is refused.
    """
    shape, config = job.grid_shape, job.config
    tokens = config.micro_batch_size * config.model.sequence_length * BYTES_OF_A_TOKEN
    # With adapters, the weights have neither gradients nor moments.
    bytes_each = job.dtype.itemsize if config.lora.rank else _bytes_of_a_parameter(job)
    parameters = job.model.num_parameters() * bytes_each
    rank = parameters / (shape.x * shape.y * shape.z * shape.pipe) + tokens / (shape.data * shape.z)
    what = f"a model of {job.model.num_parameters():,} parameters, with this batch,"
    problem = memory_problem(what, rank * ranks_here, job.device)
    if problem:
        raise UserError(problem)


def _bytes_of_a_parameter(job: Job) -> float:
    """Returns what a trained parameter needs at least on a rank's device."""
    options, data, width = job.config.optim, job.grid_shape.data, job.dtype.itemsize
    parts = options.num_parts(data)
    gradient = width / parts if options.zero > 1 else width
    elsewhere = {"none": (), "cpu": ("cuda",), "disk": ("cuda", "cpu")}[options.offload]
    state = 0 if job.device in elsewhere else options.bytes_of_state(width, data) / parts
    return width + gradient + state
