"""A run that goes on from a checkpoint tells what it told before, and nothing twice."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from axonn_ext.checkpoint.manifest import read_manifest
from axonn_ext.train.metrics import read_metrics
from trained_here import train_here

# In fp16, the scale falls twice before the checkpoint of step 3, and rises after step 4.
OPTIONS = {
    "train.steps": 5, "train.micro_batches": 2, "train.eval_interval": 2,
    "train.initial_loss_scale": 2.0**18, "train.loss_scale_window": 2,
    "checkpoint.interval": 3, "parallel.algorithm": "sequential",
}  # fmt: skip
TIMES = ("tokens_per_s", "tflops", "hardware_tflops", "memory_bytes", "eta_s")


def told(folder: Path) -> list[dict[str, Any]]:
    """All that does not depend on how fast the machine is."""
    run = read_metrics(folder)
    lines = [dataclasses.asdict(line) for line in (*run.steps, *run.evaluations)]
    return [{key: line[key] for key in line if key not in TIMES} for line in lines]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_steps_after_a_checkpoint_are_told_once_and_are_the_same(tmp_path, dtype: str) -> None:
    """Losses, rates, loss scales; also if the job ended while it wrote a line."""
    folder, options = tmp_path / "run", OPTIONS | {"train.dtype": dtype}
    train_here(folder, **options)
    want = told(folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000005")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 99.0}\n{"step": 6, "lo')
    train_here(folder, **options, checkpoint__resume="auto")
    assert told(folder) == want
    if dtype == "fp16":
        extra = read_manifest(folder / "checkpoints" / "step-00000003").extra
        assert extra["loss_scaler"]["clean_steps"] and extra["loss_scaler"]["num_overflows"]
        assert len({line["loss_scale"] for line in want if "loss_scale" in line}) > 2
