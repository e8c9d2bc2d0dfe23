"""Accelerate's minimal script with AxonnAccelerator: the losses and states of a plain process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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
pytest.importorskip("accelerate")

SCRIPT = "accelerate_script.py"
GRIDS = ["x=2", "y=2", "z=2", "x=1", "x=2,y=2", "y=2,z=2", "x=2,z=2", "x=2,data=2", "x=4"]
# Everything is computed in fp64, whose unit is 1e-16. Ten steps of SGD with momentum amplify the
# error of sums in another order by a few powers of ten.
BOUND = 1e-11


def orders() -> list[list[int]]:
    """The orders of Accelerate's sampler, which do not depend on the number of processes."""
    generators = [torch.Generator().manual_seed(3 + epoch) for epoch in range(EPOCHS)]
    return [torch.randperm(len(dataset()), generator=g).tolist() for g in generators]


def run_grid(grid: str, num_processes: int, out: Path, *options: str) -> list[float]:
    out.mkdir(exist_ok=True)
    done = start_script(SCRIPT, num_processes, out, f"--grid={grid}", *options)
    assert done.status == 0, done.output
    return read_results(out, grid)


@pytest.mark.parametrize("grid", GRIDS)
def test_losses_are_those_of_one_process(tmp_path: Path, grid: str) -> None:
    num_processes = 2 if GRIDS.index(grid) < 4 else 4
    expected, model, _ = plain_losses(orders())
    assert largest_difference(run_grid(grid, num_processes, tmp_path), expected) < BOUND
    # The saved state is that of the plain model, so it loads without axonn_ext.
    for folder in ("state", "model"):
        loaded = Net().double()
        loaded.load_state_dict(load_file(tmp_path / folder / "model.safetensors"))
        for name, p in model.named_parameters():
            torch.testing.assert_close(loaded.get_parameter(name), p, rtol=1e-9, atol=1e-11)


def test_in_one_process_without_a_launcher(tmp_path: Path) -> None:
    expected, _, _ = plain_losses(orders())
    assert largest_difference(run_grid("x=1", 0, tmp_path), expected) < BOUND


@pytest.mark.parametrize(("grid", "num_processes"), [("x=2", 2), ("y=2", 4), ("z=2,data=2", 4)])
def test_accumulates_and_clips(tmp_path: Path, grid: str, num_processes: int) -> None:
    options = ("--accumulate=2", "--clip")
    expected, _, _ = plain_losses(orders(), accumulate=2, clip=True)
    assert largest_difference(expected, plain_losses(orders())[0]) > 1e-3, "clipping does nothing"
    found = run_grid(grid, num_processes, tmp_path, *options)
    assert largest_difference(found, expected) < BOUND


def test_a_checkpoint_goes_on_on_another_grid(tmp_path: Path) -> None:
    """The optimizer's momentum moves, too; and plain Accelerate loads a grid's checkpoint."""
    first = tmp_path / "first"
    expected = run_grid("x=2,y=2", 4, first, "--epochs=1")
    load = f"--load={first / 'state'}"
    found = run_grid("z=2", 2, tmp_path / "second", load, "--epochs=1")
    plain = tmp_path / "plain"
    plain.mkdir()
    done = start_script(SCRIPT, 0, plain, load, "--epochs=1")
    assert done.status == 0, done.output
    once_more, _, _ = plain_losses([orders()[0], orders()[0]])
    assert largest_difference(expected + found, once_more) < BOUND
    assert largest_difference(expected + read_results(plain, ""), once_more) < BOUND


def test_bf16_trains(tmp_path: Path) -> None:
    """Autocast applies to the 4D Linears: bf16 has 8 bits, so losses differ by about 2^-8."""
    expected, _, _ = plain_losses(orders())
    found = run_grid("x=2", 2, tmp_path, "--precision=bf16")
    assert 1e-6 < largest_difference(found, expected) < 0.05


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_ends_all(tmp_path: Path, rank: int) -> None:
    done = start_script(SCRIPT, 2, tmp_path, "--grid=x=2", f"--failing-rank={rank}")
    assert done.status != 0
    assert "a mistake of the script" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--grid=x=3"], "AxonnAccelerator: x=3, y=1, z=1 take 3 processes, which must divide the"),
        (["--grid=x=2,data=2"], "has 4 ranks but the world has 2"),
        (["--grid=x=2", "--without-cpu"], "2 processes were started, but Accelerate sees 1"),
        (["--grid=x=2", "--precision=fp16"], "mixed_precision must be one of no, bf16, got 'fp16'"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, options: list[str], message: str) -> None:
    done = start_script(SCRIPT, 2, tmp_path, *options)
    assert done.status != 0 and message in done.output, done.output
