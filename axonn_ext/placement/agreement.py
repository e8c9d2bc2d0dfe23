"""Compares the models of all ranks before they are split: modules, shapes, and values."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from axonn_ext.grid import Grid

_ALL_AXES = ("data", "z", "y", "x")  # rank order
_FAILED = -1.0
Named = Sequence[tuple[str, nn.Parameter]]


def agree_on_parameters(grid: Grid, parameters: Named, *, what: str) -> None:
    """Raises RuntimeError, on every rank, unless all ranks have equal parameters.

    what: the caller, for messages. Values are compared by their CRC-32; tensors on the meta device
    have none. Collectives: two all-gathers over each axis, of two numbers and of one for each
    parameter.

    Raises ValueError for a parameter of a lazy module, which has no shape yet.
    """
    lazy = [name for name, p in parameters if is_lazy(p)]
    if lazy:
        with suppress(Exception):  # the error below matters
            report_failure(grid)
        raise ValueError(
            f"{what}: {lazy[0]} has no shape yet; run the model once before, or use a module that "
            "is not lazy"
        )
    facts = "\n".join(f"{n} {list(p.shape)} {p.dtype}" for n, p in parameters)
    header = _of_all_ranks(grid, [float(len(parameters)), float(zlib.crc32(facts.encode()))])
    _raise_if_failed(header, what)
    other = [rank for rank, own in enumerate(header) if own != header[0]]
    if other:
        raise RuntimeError(
            f"{what}: every rank must construct the same modules, but rank {other[0]} has other "
            f"parameters than rank 0 ({header[other[0]][0]:.0f} and {header[0][0]:.0f} of them); "
            f"this is rank {grid.rank}, with {_first_of(parameters)}"
        )
    values = _of_all_ranks(grid, [float(checksum(p)) for _, p in parameters])
    for rank, own in enumerate(values):
        for (name, _), mine, first in zip(parameters, own, values[0], strict=True):
            if mine != first:
                raise RuntimeError(
                    f"{what}: {name} has other values on rank {rank} than on rank 0; call "
                    "torch.manual_seed with the same number on every rank before the model is made"
                )


@contextmanager
def agreement(grid: Grid, *, what: str) -> Iterator[list[object]]:
    """Yields a list; raises RuntimeError at the end of the block unless it is equal on all ranks.

    The block adds to the list what must be equal, by its text. If the block raises on one rank, all
    others raise, too. Collectives: an all-gather of two numbers over each axis.
    """
    facts: list[object] = []
    try:
        yield facts
    except Exception:
        with suppress(Exception):  # the block's own error matters
            report_failure(grid)
        raise
    header = _of_all_ranks(grid, [0.0, float(zlib.crc32(repr(facts).encode()))])
    _raise_if_failed(header, what)
    other = [rank for rank, own in enumerate(header) if own != header[0]]
    if other:
        raise RuntimeError(
            f"{what}: every rank must make the same call, but rank {other[0]} differs from rank 0; "
            f"this is rank {grid.rank}, with {str(facts)[:500]}"
        )


def report_failure(grid: Grid) -> None:
    """Makes the other ranks, which are in a comparison of this module, raise."""
    _of_all_ranks(grid, [_FAILED, 0.0])


def _raise_if_failed(header: list[list[float]], what: str) -> None:
    failed = [rank for rank, own in enumerate(header) if own[0] == _FAILED]
    if failed:
        raise RuntimeError(f"{what}: rank {failed[0]} raised an exception")


def _of_all_ranks(grid: Grid, numbers: list[float]) -> list[list[float]]:
    """Returns the numbers of each rank of the world."""
    device = "cuda" if grid.device_type == "cuda" else "cpu"
    own = torch.tensor([numbers], dtype=torch.float64, device=device)
    whole = grid.unshard(own, {0: _ALL_AXES})
    rows: list[list[float]] = whole.tolist()
    return rows


def checksum(tensor: Tensor) -> int:
    """Returns the CRC-32 of the values; 0 for a tensor on the meta device."""
    if tensor.is_meta:
        return 0
    flat = tensor.detach().cpu().contiguous().flatten()
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


def _first_of(parameters: Named) -> str:
    shown = [f"{name} {list(p.shape)}" for name, p in parameters[:3]]
    return ", ".join(shown) + ("" if len(parameters) <= 3 else ", ...") if shown else "none"
