"""Fabric's minimal script with AxonnStrategy: the losses and states of a plain process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler

pytest.importorskip("lightning")
from lightning.fabric.plugins.precision import MixedPrecision, Precision

from axonn_ext.train.integrations.fabric import AxonnStrategy
from framework_cases import (
    EPOCHS,
    Net,
    dataset,
    largest_difference,
    plain_losses,
    read_results,
    start_script,
)

pytestmark = pytest.mark.slow
SCRIPT = "fabric_script.py"
GRIDS = ["x=2", "y=2", "z=2", "x=1", "x=2,y=2", "y=2,z=2", "x=2,z=2", "x=2,data=2", "x=4"]
# Fabric's "64-true" rounds the model's outputs, and so the loss, to fp32 (6e-8). These errors add
# up over ten steps of SGD; the model itself computes in fp64.
BOUND = 2e-6


def orders() -> list[list[int]]:
    """Fabric's orders in one process, whose batches are those of all ranks together."""
    found = []
    for epoch in range(EPOCHS):
        sampler = DistributedSampler(dataset(), num_replicas=1, rank=0, seed=0)
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


def run_grid(grid: str, num_processes: int, out: Path, *options: str) -> list[float]:
    out.mkdir(exist_ok=True)
    done = start_script(
        SCRIPT, num_processes, out, f"--grid={grid}", f"--devices={num_processes}", *options
    )
    assert done.status == 0, done.output
    return read_results(out, grid)


@pytest.mark.parametrize("grid", GRIDS)
def test_losses_are_those_of_one_process(tmp_path: Path, grid: str) -> None:
    num_processes = 2 if GRIDS.index(grid) < 4 else 4
    expected, model, _ = plain_losses(orders())
    assert largest_difference(run_grid(grid, num_processes, tmp_path), expected) < BOUND
    # The saved state is that of the plain model, so it loads without axonn_ext.
    saved = torch.load(tmp_path / "state.ckpt", weights_only=True)
    loaded = Net().double()
    loaded.load_state_dict(saved["model"])
    for name, p in model.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name), p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("grid", "num_processes"), [("x=2", 2), ("y=2", 4), ("z=2,data=2", 4)])
def test_accumulates_and_clips(tmp_path: Path, grid: str, num_processes: int) -> None:
    options = ("--accumulate=2", "--clip")
    expected, _, _ = plain_losses(orders(), accumulate=2, clip=True)
    assert largest_difference(expected, plain_losses(orders())[0]) > 1e-3, "clipping does nothing"
    found = run_grid(grid, num_processes, tmp_path, *options)
    assert largest_difference(found, expected) < BOUND


def test_a_checkpoint_goes_on_on_another_grid(tmp_path: Path) -> None:
    """The optimizer's momentum moves, too; and DDP in one process loads a grid's checkpoint."""
    first = tmp_path / "first"
    expected = run_grid("x=2,y=2", 4, first, "--epochs=1")
    load = f"--load={first / 'state.ckpt'}"
    found = run_grid("z=2", 2, tmp_path / "second", load, "--epochs=1")
    plain = tmp_path / "plain"
    plain.mkdir()
    done = start_script(SCRIPT, 0, plain, load, "--epochs=1")
    assert done.status == 0, done.output
    once_more, _, _ = plain_losses([orders()[0], orders()[0]])
    assert largest_difference(expected + found, once_more) < BOUND
    assert largest_difference(expected + read_results(plain, ""), once_more) < BOUND


@pytest.mark.parametrize(
    ("precision", "bits"),
    [("bf16-mixed", 8), ("bf16-true", 8), ("16-true", 11), ("32-true", 24)],
)
def test_precisions(tmp_path: Path, precision: str, bits: int) -> None:
    """The plugin applies to the 4D Linears: losses differ by a few units of its last bit."""
    expected, _, _ = plain_losses(orders())
    found = run_grid("x=2", 2, tmp_path, f"--precision={precision}")
    assert 2.0 ** -(bits + 3) < largest_difference(found, expected) < 20 * 2.0**-bits


def test_fabrics_own_launcher(tmp_path: Path) -> None:
    done = start_script(SCRIPT, 0, tmp_path, "--grid=y=2", "--devices=2")
    assert done.status == 0, done.output
    expected, _, _ = plain_losses(orders())
    assert largest_difference(read_results(tmp_path, "y=2"), expected) < BOUND


@pytest.mark.parametrize("launcher", ["torchrun", "fabric"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_ends_all(tmp_path: Path, rank: int, launcher: str) -> None:
    done = start_script(
        SCRIPT, 2 if launcher == "torchrun" else 0, tmp_path,
        "--grid=x=2", "--devices=2", f"--failing-rank={rank}",
    )  # fmt: skip
    assert done.status != 0
    assert "a mistake of the script" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--grid=x=3"], "AxonnStrategy: x=3, y=1, z=1 take 3 processes, which must divide the 2"),
        (["--grid=x=2,data=2"], "has 4 ranks but the world has 2"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, options: list[str], message: str) -> None:
    done = start_script(SCRIPT, 2, tmp_path, "--devices=2", *options)
    assert done.status != 0 and message in done.output, done.output


class Other(Precision):
    precision = "8-true"


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        # On CPUs, Fabric itself replaces it by bf16-mixed.
        (MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")), "'16-mixed' is not supp"),
        (Other(), r"'8-true' \(Other\) is not supported"),
    ],
)
def test_other_precisions_are_refused(plugin: Precision, message: str) -> None:
    with pytest.raises(ValueError, match=f"AxonnStrategy: precision {message}"):
        AxonnStrategy(precision=plugin).setup_environment()


def test_what_comes_too_early_or_without_values() -> None:
    with pytest.raises(RuntimeError, match=r"call fabric.launch\(\) first"):
        _ = AxonnStrategy(x=2).grid
    with pytest.raises(ValueError, match="empty_init=True"):
        AxonnStrategy().module_init_context(empty_init=True)
