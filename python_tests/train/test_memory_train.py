"""Runs with the optimizer's state sharded over data, or on the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonn_ext.spec.optimizer import OptimizerOptions
from axonn_ext.terminal import memory
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config_file import Override, load_config
from axonn_ext.train.job import check_memory, prepare
from axonn_ext.train.metrics import read_metrics
from commands import AXONN, SMALL, run, small

OPTIONS = {"train.steps": 8, "train.eval_interval": 4, "train.micro_batches": 2}


def train(folder: Path, grid: str, **options: object) -> list[float]:
    """Runs a training; returns its losses."""
    done = run(
        [*AXONN, "train", "--grid", grid, "--out", str(folder), *small(**OPTIONS, **options)]
    )
    assert done.status == 0, done.output
    return [step.loss for step in read_metrics(folder).steps]


@pytest.mark.slow
def test_zero_and_offload_change_no_loss(tmp_path: Path) -> None:
    """A run with both is resumed with neither, on another grid."""
    options = {"checkpoint.interval": 4}
    whole = train(tmp_path / "whole", "z=2", **options)
    divided = {
        "optim.zero": 2, "optim.offload": "disk", "optim.offload_folder": str(tmp_path),
        "optim.bucket_elements": 5000, "overlap.mode": "on",
    }  # fmt: skip
    assert train(tmp_path / "divided", "data=2", **options, **divided) == pytest.approx(
        whole, rel=1e-4
    )
    resumed = {"checkpoint.resume": str(tmp_path / "divided" / "checkpoints" / "step-00000004")}
    later = train(tmp_path / "later", "x=1", **resumed)
    assert later == pytest.approx(whole[4:], rel=1e-4)


@pytest.mark.long
def test_refused_before_anything_starts() -> None:
    done = run([*AXONN, "train", "--grid", "pipe=2", *small(**{"optim.zero": 2})])
    assert done.status == 2
    assert "optim.zero: expected 0 or 1 on pipeline stages (pipe=2), got 2" in done.output


@pytest.mark.parametrize(
    ("zero", "offload", "width", "expected"),
    [
        (0, "none", 4, 8),
        (0, "none", 2, 12),
        (1, "none", 4, 12),
        (0, "cpu", 4, 12),
        (2, "disk", 2, 12),
    ],
)
def test_bytes_of_state(zero: int, offload: str, width: int, expected: int) -> None:
    assert OptimizerOptions(zero, offload).bytes_of_state(width, data=4) == expected


@pytest.mark.parametrize(
    ("grid", "parts", "row_groups"),
    [("x=4", 4, 1), ("y=4", 4, 1), ("z=4", 4, 4), ("pipe=4", 4, 1), ("data=4", 1, 4)],
)
def test_what_a_job_needs_is_what_its_ranks_hold(
    grid: str, parts: int, row_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All axes but data divide the parameters; data and z divide the tokens."""
    keys = SMALL | {"model.num_layers": 4, "train.batch_size": 16, "train.micro_batches": 4}
    overrides = tuple(Override(key, str(value)) for key, value in keys.items())
    job = prepare(load_config(None, grid=grid, overrides=overrides), world_size=4)
    tokens = 4 * job.model.sequence_length  # per micro-batch, 16 bytes each
    a_rank = 16 * (job.model.num_parameters() // parts + tokens // row_groups)
    monkeypatch.setattr(memory.host, "memory_bytes", lambda: 3 * a_rank + 32)
    check_memory(job, ranks_here=3)
    with pytest.raises(UserError, match=r"needs at least .* this machine has"):
        check_memory(job, ranks_here=4)
