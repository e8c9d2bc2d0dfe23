"""Communicators of our own: what is refused without a GPU, and, on GPUs, what they compute.

The numbering, the comparison and the watching of calls are tested in
cpp_tests/ranks/call_log_test.cpp.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import axonn_ext
from axonn_ext import _library, communicators


@pytest.fixture
def grid(tmp_path: Path):
    """A grid of this process alone."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store = dist.FileStore(os.fspath(tmp_path / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    yield axonn_ext.Grid()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("device", "limits", "message"),
    [
        (torch.device("cpu"), {}, "device must be a GPU with its index, such as cuda:0, got cpu"),
        (0, {"min_ctas": 8, "max_ctas": 4}, "ascending order, got 8 and 4"),
        (0, {"max_ctas": -1}, "got 0 and -1"),
    ],
)
def test_bad_arguments(
    grid: axonn_ext.Grid, device: torch.device | int, limits: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        communicators.connect(grid, device, **limits)


@pytest.mark.skipif(_library.cuda is not None, reason="the CUDA parts are built")
def test_build_without_cuda_says_so(grid: axonn_ext.Grid) -> None:
    with pytest.raises(RuntimeError, match="no CUDA parts"):
        communicators.connect(grid, 0)


@pytest.mark.gpu
def test_axes_of_one_rank_have_no_communicator(grid: axonn_ext.Grid) -> None:
    connected = communicators.connect(grid, 0)
    connected.check()
    with pytest.raises(ValueError, match="axis z has no communicator"):
        connected.axis("z")
    connected.close()
