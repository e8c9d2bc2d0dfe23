"""Training with compiled blocks: the losses of a run without, and code that is compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from axonn_ext.train.metrics import RunMetrics, read_metrics
from commands import AXONN, run, small
from trained_here import train_here

pytestmark = pytest.mark.long

TOLERANCE = 1e-5  # fp32: generated code adds in another order, which grows over 6 steps


def losses(metrics: RunMetrics) -> list[float]:
    return [m.loss for m in metrics.steps] + [m.eval_loss for m in metrics.evaluations]


def test_training_and_evaluation_are_compiled_once(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    options = {"train.micro_batches": 2}
    eager = train_here(tmp_path / "eager", **options)
    compiled = train_here(tmp_path / "compiled", **options, **{"train.compile": True})
    assert losses(compiled) == pytest.approx(losses(eager), rel=TOLERANCE)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        ("x=2,z=2", {"overlap.mode": "on"}),
        pytest.param(
            "pipe=2,z=2", {"pipeline.schedule": "1f1b", "overlap.mode": "on"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipe=2,x=2", {"pipeline.defer_weights": False, "parallel.recompute": "full",
                           "train.dtype": "bf16"},
            marks=pytest.mark.slow,
        ),
        pytest.param("x=2,data=2", {"goldfish.k": 4, "optim.zero": 2}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_job_learns_what_it_learns_without(grid: str, options: dict, tmp_path: Path) -> None:
    options = {"train.micro_batches": 2, "train.batch_size": 16} | options
    found = {}
    for compiles in (False, True):
        folder = tmp_path / str(compiles)
        command = small(**options | {"train.compile": compiles})
        done = run([*AXONN, "train", "--grid", grid, "--out", str(folder), *command])
        assert done.status == 0, done.output
        assert ("compiling the blocks" in done.output) == compiles
        assert ("warm-up: compiled the blocks" in done.output) == compiles
        found[compiles] = losses(read_metrics(folder))
    # Generated code does not round intermediate results to bf16.
    tolerance = 1e-2 if options.get("train.dtype") == "bf16" else TOLERANCE
    assert found[True] == pytest.approx(found[False], rel=tolerance)
