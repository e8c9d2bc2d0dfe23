"""Training on GPUs by the command: the losses of CPUs, and the same bits each time."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from axonn_ext.train.metrics import read_metrics
from commands import AXONN, run, small

pytestmark = [pytest.mark.gpu, pytest.mark.long]

PARTS = {"train.micro_batches": 2, "train.eval_batches": 4, "model.num_layers": 2}
RUNS = {
    "x=2,z=2": {"overlap.mode": "on", "parallel.algorithm": "chunked"},
    "y=2,data=2": {
        "parallel.layout": "replicated", "optim.zero": 1, "parallel.algorithm": "sequential"
    },
    "pipe=2,z=2": {
        "pipeline.schedule": "1f1b", "overlap.mode": "on", "parallel.algorithm": "sequential"
    },
}  # fmt: skip
# A GPU's matrix products and exponentials round differently from a CPU's: 1e-7 per step.
FP32_ERROR = 1e-5
# With 8 bits of mantissa, about a hundred operations have random rounding errors of 2^-9 in each of
# six steps. The relative differences of the losses, about 5, are below this.
BF16_ERROR = 2e-2


def train(folder: Path, device: str, grid: str, options: dict[str, object]) -> list[float]:
    chosen = PARTS | options | {"train.device": device}
    command = [*AXONN, "train", "--grid", grid, "--out", str(folder), *small(**chosen)]
    done = run(command)
    assert done.status == 0, done.output
    found = read_metrics(folder)
    return [m.loss for m in found.steps] + [m.eval_loss for m in found.evaluations]


def norms(folder: Path) -> list[float]:
    return [m.grad_norm for m in read_metrics(folder).steps]


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[float]]]:
    """`on_gpus(grid)`: the folder and the losses of a run on GPUs, cached by grid."""
    done: dict[str, tuple[Path, list[float]]] = {}

    def get(grid: str) -> tuple[Path, list[float]]:
        if grid not in done:
            folder = tmp_path_factory.mktemp("gpus") / "run"
            done[grid] = folder, train(folder, "cuda", grid, RUNS[grid])
        return done[grid]

    return get


@pytest.mark.parametrize("grid", RUNS)
def test_gpus_learn_what_cpus_learn(on_gpus, tmp_path: Path, grid: str) -> None:
    folder, here = on_gpus(grid)
    there = train(tmp_path / "cpu", "cpu", grid, RUNS[grid])
    assert len(here) == 9
    assert here == pytest.approx(there, rel=FP32_ERROR)
    assert norms(folder) == pytest.approx(norms(tmp_path / "cpu"), rel=10 * FP32_ERROR)


def test_the_same_bits_again(on_gpus, tmp_path: Path) -> None:
    grid = "x=2,z=2"
    folder, first = on_gpus(grid)
    assert train(tmp_path / "again", "cuda", grid, RUNS[grid]) == first
    assert norms(tmp_path / "again") == norms(folder)


FUSED_OPTIONS = {"train.dtype": "bf16", "model.hidden_size": 64, "train.steps": 2}


def train_with_fused_ops(folder: Path) -> list[float]:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the fused kernels are for sm_80 and later")
    fused = RUNS["x=2,z=2"] | FUSED_OPTIONS | {"parallel.algorithm": "fused"}
    return train(folder, "cuda", "x=2,z=2", fused)


@pytest.fixture(scope="module")
def losses_with_fused_ops(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train_with_fused_ops(tmp_path_factory.mktemp("fused") / "run")


def test_with_fused_ops(losses_with_fused_ops, tmp_path: Path) -> None:
    there = train(tmp_path / "cpu", "cpu", "x=2,z=2", RUNS["x=2,z=2"] | FUSED_OPTIONS)
    assert losses_with_fused_ops == pytest.approx(there, rel=BF16_ERROR)


def test_with_fused_ops_the_same_bits_again(losses_with_fused_ops, tmp_path: Path) -> None:
    assert train_with_fused_ops(tmp_path / "again") == losses_with_fused_ops


def test_the_profile_has_the_allocations_of_its_steps(tmp_path: Path) -> None:
    """Tensors of the forward pass are among those that are allocated and freed."""
    keys = small(**PARTS | {"train.device": "cuda", "model.num_layers": 1, "train.steps": 4})
    done = run([*AXONN, "train", "--profile", "--out", str(tmp_path), *keys])
    assert done.status == 0, done.output
    assert "memory.pickle" in done.output
    with (tmp_path / "memory.pickle").open("rb") as file:
        (events, *_) = pickle.load(file)["device_traces"]
    assert {"alloc", "free_completed"} <= {event["action"] for event in events}
    lines = {frame["filename"] for event in events for frame in event["frames"]}
    assert any(line.endswith("axonn_ext/nn/linear.py") for line in lines)
