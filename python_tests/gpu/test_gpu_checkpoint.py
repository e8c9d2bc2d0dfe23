"""Checkpoints of models on GPUs: saved and loaded there, and moved to the CPU and back."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from axonn_ext import GridShape
from checkpoint_cases import Setup, load_and_go_on, train_and_save

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_grid_goes_on_bit_for_bit(gpu_pool, tmp_path, dtype) -> None:
    setup = Setup(GridShape(2), dtype=dtype, device="cuda")
    want = gpu_pool(2).run(train_and_save, setup, tmp_path / "one")[0]
    for got in gpu_pool(2).run(load_and_go_on, setup, tmp_path / "one"):
        assert got == want


def test_the_cpu_reads_what_gpus_wrote(gpu_pool, pool, tmp_path) -> None:
    setup = Setup(GridShape(1, 2), device="cuda")
    want = gpu_pool(2).run(train_and_save, setup, tmp_path / "one")[0]
    on_cpu = dataclasses.replace(setup, shape=GridShape(1, 1, 2), device="cpu")
    for got in pool(2).run(load_and_go_on, on_cpu, tmp_path / "one"):
        assert got["digests"] == want["digests"]
