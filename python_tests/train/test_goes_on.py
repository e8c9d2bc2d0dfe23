"""A run that resumes from a checkpoint reports the same values as before, and nothing twice."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from axonn_ext.checkpoint.reading import read_manifest
from axonn_ext.data import Batch, PackedBatches, TrainingBatches
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
    """All metrics that do not depend on the machine's speed."""
    run = read_metrics(folder)
    lines = [dataclasses.asdict(line) for line in (*run.steps, *run.evaluations)]
    return [{key: line[key] for key in line if key not in TIMES} for line in lines]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_steps_after_a_checkpoint_are_told_once_and_are_the_same(tmp_path, dtype: str) -> None:
    """Losses, rates and loss scales are the same, even if the job ended while writing a line."""
    folder, options = tmp_path / "run", OPTIONS | {"train.dtype": dtype}
    whole = train_here(folder, **options)
    assert [each.step for each in whole.evaluations] == [0, 2, 4, 5]
    assert whole.steps[0].eta_s > 0 == whole.steps[-1].eta_s
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


@pytest.mark.parametrize(
    "order",
    [
        {"data.order": "documents"},
        pytest.param({"data.order": "examples", "data.max_bytes": 0}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_another_batch_size_goes_on_behind_what_was_read(
    tmp_path, capsys, monkeypatch, order
) -> None:
    """It changes twice: 3 steps of 8 sequences, then 2 of 4 and 2 of 16 read 0 to 63 once."""
    (text := tmp_path / "texts").mkdir()
    for number in range(80):
        (text / f"{number}.txt").write_text(f"{number} " * 60)
    read: list[bytes] = []

    def seen(batches: TrainingBatches | PackedBatches, step: int, index: int) -> Batch:
        batch = real[type(batches)](batches, step, index)
        read.extend(row.numpy().tobytes() for row in batch.token_ids)
        return batch

    real = {kind: kind.micro_batch for kind in (TrainingBatches, PackedBatches)}
    for kind in real:
        monkeypatch.setattr(kind, "micro_batch", seen)
    options = OPTIONS | order | {"data.text": text, "train.eval_interval": 0}
    train_here(tmp_path / "whole", **options | {"train.batch_size": 8, "train.steps": 8})
    want, read[:] = list(read), []
    for size, steps in ((8, 3), (4, 5), (16, 7)):
        changed = {"train.batch_size": size, "train.steps": steps, "checkpoint.resume": "auto"}
        train_here(tmp_path / "run", **options | changed)
    assert read == want
    out = capsys.readouterr().out
    assert "train.batch_size was 4 in the run that is continued, now 16: it continues with" in out
    tokens = [step.tokens for step in read_metrics(tmp_path / "run").steps]
    assert [count // 32 for count in tokens] == [8, 16, 24, 28, 32, 48, 64]
