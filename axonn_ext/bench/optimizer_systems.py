"""The compared ways to run AdamW over the same weights, on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from axonn_ext.calibrate.this_machine import DTYPES
from axonn_ext.optim import AdamW

TORCH, DEVICE, CPU, DISK = "torch", "device", "cpu", "disk"
SYSTEMS = (TORCH, DEVICE, CPU, DISK)
OFFLOADS = {DEVICE: "none", CPU: "cpu", DISK: "disk"}
MATRICES, VECTORS = 4, 4
VECTOR_SHARE = 1024  # one in this many elements is in a vector
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
FP32 = 4  # bytes


@dataclass(frozen=True)
class Case:
    """What is timed: the number of elements, the dtype of weights by its short name, and where.

    folder: of the files of DISK
    """

    elements: int
    dtype: str
    device: str
    bucket_elements: int
    folder: Path


@dataclass(frozen=True)
class Bytes:
    """The bytes of weights, gradients, masters and moments in each place."""

    device: int
    host: int = 0
    disk: int = 0


@dataclass(frozen=True)
class System:
    """One way to update weights by the gradients that all systems share.

    step     applies the gradients that `take` has announced
    take     is called after the gradients have changed
    weights  returns the weights, in their own dtype
    """

    step: Callable[[], None]
    take: Callable[[], None]
    weights: Callable[[], list[Tensor]]
    num_bytes: Bytes


def shapes_of(elements: int) -> list[tuple[int, ...]]:
    """Returns the shapes of a few matrices and vectors with that many elements in total."""
    in_matrices = elements - elements // VECTOR_SHARE
    columns = max(1, math.isqrt(in_matrices // MATRICES))
    rows = in_matrices // (MATRICES * columns)
    rest = elements - MATRICES * rows * columns
    lengths = (rest * (i + 1) // VECTORS - rest * i // VECTORS for i in range(VECTORS))
    matrices: list[tuple[int, ...]] = [(rows, columns)] * (MATRICES if rows else 0)
    return matrices + [(length,) for length in lengths if length]


def drawn(case: Case, seed: int) -> list[Tensor]:
    """Returns tensors of the case's shapes and dtype from a normal distribution."""
    generator = torch.Generator(case.device).manual_seed(seed)
    tensors = [
        torch.empty(shape, dtype=DTYPES[case.dtype], device=case.device)
        for shape in shapes_of(case.elements)
    ]
    for tensor in tensors:
        tensor.normal_(generator=generator)
    return tensors


def build(system: str, case: Case, gradients: Sequence[Tensor]) -> System:
    """Returns a system whose weights have their initial values.

    Raises OSError if the disk has no room.
    """
    if system == TORCH:
        return _torch(case, gradients)
    parameters = [nn.Parameter(weight) for weight in drawn(case, seed=0)]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = AdamW(
        parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, offload=OFFLOADS[system],
        bucket_elements=case.bucket_elements, folder=case.folder,
    )  # fmt: skip
    state = num_bytes(
        t for p in optimizer.pieces for t in (p.master, *p.state.values())
        if t is not p.parameter and t.dim()
    )  # fmt: skip
    there = num_bytes(parameters) + num_bytes(gradients)
    return System(
        step=optimizer.step,
        take=lambda: None,
        weights=lambda: [p.detach() for p in parameters],
        num_bytes=_bytes(system, case.device, there, state),
    )


def _torch(case: Case, gradients: Sequence[Tensor]) -> System:
    """Returns torch's fused AdamW over fp32 masters, whose fp32 gradients already exist."""
    masters = [nn.Parameter(weight.float()) for weight in drawn(case, seed=0)]
    for master in masters:
        master.grad = torch.empty_like(master, requires_grad=False)
    matrices = [master for master in masters if master.dim() >= 2]
    vectors = [master for master in masters if master.dim() < 2]
    groups = [
        {"params": chosen, "weight_decay": decay}
        for chosen, decay in ((matrices, DECAY), (vectors, 0.0))
        if chosen
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)

    def take() -> None:
        for master, gradient in zip(masters, gradients, strict=True):
            assert master.grad is not None
            master.grad.copy_(gradient)

    return System(
        step=optimizer.step,
        take=take,
        weights=lambda: [m.detach().to(DTYPES[case.dtype]) for m in masters],
        num_bytes=Bytes(device=4 * num_bytes(masters)),  # master, gradient and two moments
    )


def moved_bytes(system: str, case: Case) -> int:
    """Returns the bytes that a step must read and write, where the state is updated."""
    width = DTYPES[case.dtype].itemsize
    state = 2 * 3 * FP32  # master and moments, read and written
    if system == TORCH:
        return case.elements * (FP32 + state)
    apart = width < FP32 or system != DEVICE  # master and weight differ; both are written
    return case.elements * (width + state + (width if apart else 0))


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the elements of all tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def _bytes(system: str, device: str, there: int, state: int) -> Bytes:
    """Returns the places of `there`, which is on the device, and of a system's state."""
    if system == DISK:
        return Bytes(device=there, disk=state)
    if system == CPU and device != "cpu":
        return Bytes(device=there, host=state)
    return Bytes(device=there + state)  # on a CPU, both are host memory
