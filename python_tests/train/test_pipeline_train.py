"""axonn-ext train on pipeline stages: the losses of one process, and checkpoints between grids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from axonn_ext.train.metrics import read_metrics
from commands import AXONN, run, small
from trained_here import train_here

pytestmark = pytest.mark.long

PARTS = {"train.micro_batches": 4, "train.eval_batches": 8, "model.num_layers": 4}
SAVES = {"checkpoint.interval": 3, "optim.final_lr_fraction": 1}


def train(folder: Path, grid: str, **options: object) -> str:
    done = run([*AXONN, "train", "--grid", grid, "--out", str(folder), *small(**options)])
    assert done.status == 0, done.output
    return done.output


def losses(folder: Path) -> list[float]:
    found = read_metrics(folder)
    return [m.loss for m in found.steps] + [m.eval_loss for m in found.evaluations]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in plain torch.nn, in one process."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    train_here(folder, **PARTS, **{"model.implementation": "plain"})
    return folder


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        ("pipe=2,x=2", {"pipeline.defer_weights": False}),
        pytest.param(
            "pipe=2,z=2", {"pipeline.schedule": "1f1b", "overlap.mode": "on"},
            marks=pytest.mark.slow,
        ),
        pytest.param("pipe=4", {"pipeline.schedule": "zero_bubble"}, marks=pytest.mark.slow),
        pytest.param(
            "pipe=2,data=2", {"pipeline.schedule": "interleaved", "pipeline.chunks": 2,
                              "parallel.layout": "replicated", "parallel.recompute": "every:2"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipe=2,y=2", {"overlap.mode": "on", "pipeline.blocks": "3,1"}, marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_learns_what_plain_learns(plain, tmp_path, grid, options) -> None:
    output = train(tmp_path / "run", grid, **PARTS, **options)
    # fp32 sums in a different order: 1e-7 per step, and 6 steps are too few for it to grow.
    torch.testing.assert_close(losses(tmp_path / "run"), losses(plain), rtol=1e-5, atol=0)
    assert "ms exposed, bubbles included" in output
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("pipe=2", "x=2"), ("z=2,x=2", "pipe=4")])
def test_goes_on_with_another_number_of_stages(tmp_path, first, second) -> None:
    options = PARTS | SAVES
    train_here(tmp_path / "whole", **options)
    train(tmp_path / "run", first, **options | {"train.steps": 3})
    train(tmp_path / "run", second, **options, **{"checkpoint.resume": "auto"})
    want = [m.loss for m in read_metrics(tmp_path / "whole").steps]
    got = [m.loss for m in read_metrics(tmp_path / "run").steps]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
