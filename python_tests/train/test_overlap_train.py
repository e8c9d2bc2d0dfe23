"""Overlap in training runs: the same losses, a profile, and the summary of a run."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from axonn_ext import GridShape
from axonn_ext.nn import Linear
from axonn_ext.overlap import Orchestrator
from axonn_ext.train.exposure import Exposure
from axonn_ext.train.metrics import read_metrics
from commands import AXONN, run, small
from grids import grid_of

pytestmark = pytest.mark.long

# With a constant learning rate, the first steps do not depend on the number of steps.
OPTIONS = {"train.steps": 11, "train.eval_interval": 4, "train.micro_batches": 2,
           "optim.final_lr_fraction": 1}  # fmt: skip
ON = {"overlap.mode": "on", "overlap.prefetch": 2}
GRID = ["--grid", "z=2,data=2"]


@pytest.fixture(scope="module")
def folder_and_output(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a run with overlap."""
    folder = tmp_path_factory.mktemp("overlap") / "on"
    options = small(**OPTIONS | ON)
    done = run([*AXONN, "train", *GRID, "--profile", "--out", str(folder), *options])
    assert done.status == 0, done.output
    return folder, done.output


def test_losses_are_those_of_the_same_collectives_waited_for_at_once(
    folder_and_output: tuple[Path, str], tmp_path: Path
) -> None:
    """In 11 steps, 2, 4, 6 and 8 wait for every collective at once; in a run of 9, none does."""
    folder, _ = folder_and_output
    options = small(**OPTIONS | ON | {"train.steps": 9})
    done = run([*AXONN, "train", *GRID, "--out", str(tmp_path / "run"), *options])
    assert done.status == 0, done.output
    mixed, on = read_metrics(folder), read_metrics(tmp_path / "run")
    assert [m.loss for m in mixed.steps][:9] == [m.loss for m in on.steps]
    assert [m.eval_loss for m in mixed.evaluations][:2] == [m.eval_loss for m in on.evaluations][:2]
    assert "without overlap" not in done.output


def test_the_end_of_a_run_tells_exposed_from_hidden(folder_and_output: tuple[Path, str]) -> None:
    _, output = folder_and_output
    for axis in ("z", "data"):
        assert re.search(rf"^  {axis} +\d+\.\d\d ms exposed +\d+\.\d\d ms hidden$", output, re.M)
    verdict = r"(overlap gains \d+% of the step|warning: overlap is on and does not help): "
    assert re.search(verdict + r"[\d.]+ ms a step, [\d.]+ ms without overlap", output)


def test_profile_is_a_chrome_trace_of_compute_and_lanes(
    folder_and_output: tuple[Path, str],
) -> None:
    folder, _ = folder_and_output
    events = json.loads((folder / "profile.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    names: dict[str, list[str]] = {name: [] for name in rows.values()}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            names[rows[event["tid"]]].append(event["name"])
    assert list(names) == ["compute", "axis z", "waiting for z", "axis data", "waiting for data"]
    # Steps 9, 10 and 11 of 11, in two micro-batches each.
    step = ["read the batch", *["forward", "backward"] * 2, "sum gradients", "optimizer"]
    assert names["compute"] == step * 3
    assert names["axis z"].count("all_gather blocks.0.mlp.up.weight for forward") == 3
    assert names["axis z"].count("reduce_scatter blocks.0.mlp.up.weight.grad") == 6
    assert sum(name.startswith("all_reduce") for name in names["axis data"]) >= 3
    assert not (folder / "memory.pickle").exists(), "only on GPUs"
    assert sorted(names["axis z"]) == sorted(names["waiting for z"])


def judged(overlapped_s: float, at_once_s: float) -> str:
    """The summary for steps that take these times."""
    grid = grid_of(GridShape(z=2))
    layer = Linear(8, 8, grid=grid, role="expand")
    with Orchestrator(layer) as orchestrator:
        exposure = Exposure(grid, orchestrator, num_steps=10)
        for number in range(1, 11):
            with exposure.step(number):
                layer(torch.ones(2, 8)).sum().backward()
                orchestrator.sync_gradients()
                time.sleep(at_once_s if number in (2, 4, 6, 8) else overlapped_s)
    return exposure.summary()[-1]


def test_overlap_that_does_not_help_is_warned_about(pool) -> None:
    for verdict in pool(2).run(judged, 0.1, 0.0):
        assert verdict.startswith("warning: overlap is on and does not help: ")
    for verdict in pool(2).run(judged, 0.0, 0.1):
        assert re.match(r"overlap gains \d\d% of the step: ", verdict)


def watched(num_steps: int, folder: Path) -> tuple[list[str], list[int]]:
    """The steps in the profile of a run, and those that waited for every collective at once."""
    grid = grid_of(GridShape(z=2))
    layer = Linear(8, 8, grid=grid, role="expand")
    profile = folder / f"{grid.rank}.json"
    with Orchestrator(layer) as orchestrator:
        setter = mock.Mock(wraps=orchestrator.set_wait_at_once)
        orchestrator.set_wait_at_once = setter
        exposure = Exposure(grid, orchestrator, num_steps=num_steps, profile=profile)
        for number in range(1, num_steps + 1):
            with exposure.step(number), exposure.span(f"step {number}"):
                layer(torch.ones(2, 8)).sum().backward()
                orchestrator.sync_gradients()
    at_once = [step for step, call in enumerate(setter.call_args_list, start=1) if call.args[0]]
    events = json.loads(profile.read_text())["traceEvents"]
    return [e["name"] for e in events if e["name"].startswith("step ")], at_once


@pytest.mark.parametrize(
    ("num_steps", "profiled", "at_once"),
    [
        (2, [2], []),
        (3, [2, 3], []),
        (9, [2, 3, 4], []),
        (10, [8, 9, 10], [2, 4, 6]),
        (11, [9, 10, 11], [2, 4, 6, 8]),
        (30, [10, 11, 12], [2, 4, 6, 8]),
    ],
)
def test_a_profile_has_three_steps_with_overlap_if_the_run_has_them(
    pool, tmp_path: Path, num_steps: int, profiled: list[int], at_once: list[int]
) -> None:
    for answer in pool(2).run(watched, num_steps, tmp_path):
        assert answer == ([f"step {number}" for number in profiled], at_once)
