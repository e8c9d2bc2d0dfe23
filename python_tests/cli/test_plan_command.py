"""`axonn-ext plan`: its output, files and errors; it runs without Torch."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import axonn_ext
from axonn_ext.cli import main
from axonn_ext.cli.plan.command import add_parser
from axonn_ext.cli.plan.request import make_request
from axonn_ext.planner import Request, load_machine
from axonn_ext.spec.grid import COMMUNICATING
from axonn_ext.spec.stages import Stages
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config_file import load_config
from axonn_ext.train.job import prepare

ROOT = Path(__file__).resolve().parents[2]
INTERFACES = (ROOT / "docs" / "interfaces.md").read_text()
Capture = pytest.CaptureFixture[str]
SMALL = ("plan", "--model", "gpt2-small", "--machine", "dgx-a100", "--global-batch", "64")
ON_8 = (*SMALL, "--gpus", "8")
PNG = b"\x89PNG\r\n\x1a\n"


def numbers(line: str) -> list[float]:
    return [float(text.replace(",", "")) for text in re.findall(r"-?[\d,]*\d(?:\.\d+)?", line)]


# --- Without Torch -------------------------------------------------------------------------------

LARGEST = r"""
import re, sys
from pathlib import Path
import axonn_ext, axonn_ext.planner
from axonn_ext.cli import main
from counts import calls_of

def loaded():
    return sorted({"torch", "numpy", "matplotlib", "axonn_ext.ops"} & set(sys.modules))

try:
    main(["--help"])
except SystemExit:
    pass
found = []
calls = calls_of(lambda: found.append(main([
    "plan", "--model", "gpt-320b", "--machine", "perlmutter", "--gpus", "32768",
    "--global-batch", "8192", "--pipe", "8", "--json", sys.argv[1]])))
# Not ru_maxrss, which starts from what the parent process had.
peak = 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
assert (found, loaded()) == ([0], []), (found, loaded())
# Python 3.11 makes 8.4 million.
assert calls < 16e6, calls
assert peak < 500e6, peak
axonn_ext.Grid
import torch
torch.ops.axonn.linear_forward
"""


@pytest.mark.long
def test_largest_plan_needs_no_torch_and_little_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = subprocess.run(
        [sys.executable, "-c", LARGEST, str(path)], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "python_tests" / "support")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "train a language model" in done.stdout
    best = json.loads(path.read_text())["configs"][0]
    assert math.prod(best["grid"].values()) == 32768


def test_names_of_the_package_are_loaded_when_used() -> None:
    for name in axonn_ext.__all__:
        assert getattr(axonn_ext, name) is not None
        assert name in dir(axonn_ext)
    with pytest.raises(AttributeError, match="has no attribute 'grids'"):
        axonn_ext.grids  # noqa: B018
    with pytest.raises(ImportError, match="grids"):
        from axonn_ext import grids  # noqa: F401


# --- What is shown and written -------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all files that one command writes, and its output."""
    folder = tmp_path_factory.mktemp("plan")
    options = {"json": "plan.json", "plot": "plan.png", "timeline": "step.json"}
    options["write-config"] = "best.toml"
    arguments = [f"--{name}={folder / file}" for name, file in options.items()]
    with (folder / "shown.txt").open("w") as shown, contextlib.redirect_stdout(shown):
        assert main([*ON_8, *arguments]) == 0
    return folder


@pytest.fixture(scope="module")
def content(files: Path) -> Any:
    return json.loads((files / "plan.json").read_text())


def test_table_shows_what_the_json_holds(files: Path, content: Any) -> None:
    head, count, _, titles, *rows = (files / "shown.txt").read_text().splitlines()
    assert "gpt2-small (124 M parameters) on 8 GPUs of dgx-a100; a step of 64 x 1,024" in head
    assert numbers(count)[:2] == [content["num_considered"], content["num_fit"]]
    for title in ("grid", "step", "% of peak", "tokens/s", "memory", "exposed"):
        assert title in titles
    configs = content["configs"]
    assert max(map(len, rows[: len(configs)])) <= 100
    of_options = rows[rows.index("") + 1 :]
    for number, config in enumerate(configs, start=1):
        row, options = rows[number - 1], of_options[number - 1]
        assert row.split()[0] == options.split()[0] == str(number)
        assert f"{100 * config['peak_fraction']:.1f}" in row
        assert f" {config['micro_batches']} x " in options and config["layout"] in options
    best = configs[0]
    assert any(row.startswith(f"the best is limited by {best['binding']}") for row in rows)
    assert any(f"{best['days']:,.1f} days" in row for row in rows)
    reasons = itertools.takewhile(bool, rows[rows.index("rejected:") + 1 :])
    lines = [line.split(maxsplit=1) for line in reasons]
    rejected = {reason: int(count.replace(",", "")) for count, reason in lines}
    assert rejected == content["rejected"] and rejected


def test_json_adds_up_and_its_keys_are_documented(content: Any) -> None:
    section = INTERFACES.partition("## Planner")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    configs = content["configs"]
    assert all(set(config) == documented for config in configs)
    assert set(content) == {"model", "configs"} | {
        name for name in re.findall(r'"(\w+)"', section) if name in content
    }
    watts = load_machine("dgx-a100").watts
    assert [c["step_time_s"] for c in configs] == sorted(c["step_time_s"] for c in configs)
    assert content["num_fit"] + sum(content["rejected"].values()) == content["num_considered"]
    for config in configs:
        waits = sum(config["exposed_s"].values())
        assert config["compute_s"] + waits == pytest.approx(config["step_time_s"], rel=1e-6)
        assert sum(config["memory_items"].values()) == config["memory_bytes"]
        assert config["memory_bytes"] <= content["memory_limit_bytes"]
        assert set(config["bytes_sent"]) == set(COMMUNICATING)
        seconds = content["token_budget"] / config["tokens_per_s"]
        assert config["days"] == pytest.approx(seconds / 86400)
        assert config["gpu_hours"] == pytest.approx(8 * seconds / 3600)
        assert config["energy_mwh"] == pytest.approx(config["gpu_hours"] * watts / 1e6)
        assert config["cost"] is None


def test_explanation_adds_up(content: Any, capsys: Capture) -> None:
    number = next(i for i, c in enumerate(content["configs"], 1) if sum(c["exposed_s"].values()))
    config = content["configs"][number - 1]
    assert main([*ON_8, "--explain", str(number)]) == 0
    text = capsys.readouterr().out.partition(f"number {number}: ")[2]
    memory, time, axes = (part.splitlines() for part in text.split("\n\n")[1:4])
    *items, total = [numbers(line)[0] for line in memory[1:-1]]
    assert total == pytest.approx(config["memory_bytes"] / 1e9, abs=0.01)
    assert sum(items) == pytest.approx(total, abs=0.005 * (len(items) + 1))
    *kinds, step = [numbers(line)[0] for line in time[1:]]
    assert step == pytest.approx(config["step_time_s"] * 1e3, abs=0.01)
    assert sum(kinds) == pytest.approx(step, rel=0.01, abs=0.005 * (len(kinds) + 1))
    for line in axes[1:]:
        if line.split():
            assert numbers(line)[0] == config["grid"][line.split()[0]]


def test_explanation_of_a_grid_that_is_not_shown(
    content: Any, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "plan.json"
    assert main([*ON_8, "--top", "2", "--explain", "3", "--json", str(path)]) == 0
    _, table, options, *_ = capsys.readouterr().out.split("\n\n")
    for part in (table.splitlines()[1:], options.splitlines()):
        assert [line.split()[0] for line in part] == ["1", "2"]
    assert json.loads(path.read_text())["configs"] == content["configs"][:2]


def test_mistaken_explanation_writes_nothing(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "plan.json"
    assert main([*ON_8, "--explain", "99", "--json", str(path)]) == 2
    captured = capsys.readouterr()
    assert not path.exists() and not captured.out
    assert re.search(r"expected at most \d+, .* got 99", captured.err)


def test_timeline_of_many_micro_batches_has_three_of_them(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "step.json"
    assert main([*ON_8, "--micro-batches", "8", "--timeline", str(path)]) == 0
    assert f"{path} has micro-batches 1, 7, 8 of 8" in capsys.readouterr().out
    spans = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["args"]["micro_batch"] for e in spans} == {0, 6, 7}


def test_written_configuration_has_the_models_rotary_base_and_norms(tmp_path: Path) -> None:
    written = tmp_path / "planned.toml"
    base = ["plan", "--machine", "dgx-h100", "--gpus", "8", "--global-batch", "8"]
    base += ["--recompute", "full", "--overlap", "off", "--write-config", str(written)]
    assert main([*base, "--model", "llama3-8b"]) == 0
    assert load_config(written).model.rope_theta == 500000.0
    values = {
        "model_type": "llama", "vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 512, "max_position_embeddings": 64,
        "rope_theta": 2e6, "rms_norm_eps": 3e-6, "initializer_range": 0.03,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert main([*base, "--model", str(tmp_path)]) == 0
    model = load_config(written).model
    assert (model.rope_theta, model.norm_eps, model.init_std) == (2e6, 3e-6, 0.03)


def test_demo_can_be_planned(tmp_path: Path) -> None:
    path, demo = tmp_path / "plan.json", ROOT / "examples" / "demo.toml"
    arguments = ["plan", "--model", str(demo), "--machine", "host", "--gpus", "4"]
    arguments += ["--global-batch", "32", "--dtype", "fp32", "--json", str(path)]
    assert main([*arguments, "--plot", str(tmp_path / "a.PNG")]) == 0
    model = prepare(load_config(demo), world_size=4).model
    planned = json.loads(path.read_text())["model"]
    assert planned["num_parameters"] == model.num_parameters()
    assert (tmp_path / "a.PNG").read_bytes().startswith(PNG)


def test_memory_fraction_is_the_planners() -> None:
    args = make_parser().parse_args([*ON_8])
    assert args.memory_fraction == make_request(args).memory_fraction == Request.memory_fraction


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser


def test_measured_machine_that_cannot_be(capsys: Capture) -> None:
    assert main([*ON_8, "--machine", "this"]) == 2
    message = capsys.readouterr().err
    assert "machine 'this' is not measured yet: run axonn-ext bench links" in message


def test_timeline_is_a_step_in_which_streams_do_one_thing_at_a_time(
    files: Path, content: Any
) -> None:
    trace = json.loads((files / "step.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    grid = content["configs"][0]["grid"]
    assert set(rows.values()) == {"compute"} | {f"axis {a}" for a in grid if grid[a] > 1}
    spans = [e for e in trace if e["ph"] == "X"]
    for row in rows:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == row)
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(mine))
    longest = max(e["ts"] + e["dur"] for e in spans)
    assert longest / 1e6 == pytest.approx(content["configs"][0]["step_time_s"], rel=0.02)
    assert (files / "step.png").read_bytes().startswith(PNG)
    assert (files / "plan.png").read_bytes().startswith(PNG)


def test_written_configuration_is_what_was_planned_and_can_be_prepared(
    files: Path, content: Any
) -> None:
    best, config = content["configs"][0], load_config(files / "best.toml")
    job = prepare(config, world_size=8)
    assert job.config.grid.as_dict() == best["grid"]
    assert job.model.num_parameters() == content["model"]["num_parameters"]
    assert (config.train.batch_size, config.train.micro_batches) == (64, best["micro_batches"])
    assert config.train.dtype == "bf16"
    for key in ("layout", "heads_over_y", "save_gathered", "reshard_after_forward", "recompute"):
        assert getattr(config.parallel, key) == best[key]
    overlap = dataclasses.asdict(config.overlap)
    mode = overlap.pop("mode")
    assert (overlap.pop("communicators"), overlap.pop("max_ctas")) == ("auto", 0)
    assert (mode, overlap) == ("on", best["overlap"]) if best["overlap"] else mode == "off"


def test_zero_and_offload_that_are_searched_are_shown_and_written(
    tmp_path: Path, capsys: Capture
) -> None:
    """The model needs one of them: with this little memory, it does not fit without."""
    arguments = ["plan", "--model", "gpt2-xl", "--machine", "dgx-a100", "--gpus", "8", "--top", "1",
                 "--global-batch", "64", "--grid", "x=1,y=1,z=1", "--set",
                 "memory_bytes=3e10"]  # fmt: skip
    assert main(arguments) != 0
    assert "would do" in capsys.readouterr().err
    files = [tmp_path / "best.toml", tmp_path / "plan.json"]
    given = ["--zero", "auto", "--offload", "auto"]
    assert main([*arguments, *given, "--write-config", str(files[0]), "--json", str(files[1])]) == 0
    chosen = json.loads(files[1].read_text())["configs"][0]["optimizer"]
    assert (chosen["zero"], chosen["offload"]) != (0, "none")
    out = capsys.readouterr().out
    assert f"zero {chosen['zero']}" in out or f"offload {chosen['offload']}" in out
    optim = load_config(files[0]).optim
    assert (optim.zero, optim.offload) == (chosen["zero"], chosen["offload"])


def test_zero_and_offload_are_written_and_read_again(tmp_path: Path, capsys: Capture) -> None:
    first, second, path = (tmp_path / name for name in ("first.toml", "second.toml", "plan.json"))
    arguments = ["--machine", "dgx-a100", "--gpus", "8", "--global-batch", "64"]
    chosen = ["--zero", "1", "--offload", "cpu", "--write-config", str(first)]
    assert main(["plan", "--model", "gpt2-small", *arguments, *chosen]) == 0
    assert "zero 1, offload cpu" in capsys.readouterr().out
    config = load_config(first)
    assert (config.optim.zero, config.optim.offload) == (1, "cpu")
    arguments += ["--zero", "2", "--json", str(path), "--write-config", str(second)]
    assert main(["plan", "--model", str(first), *arguments]) == 0
    config = load_config(second)
    assert (config.optim.zero, config.optim.offload) == (2, "cpu")
    for planned in json.loads(path.read_text())["configs"]:
        assert planned["optimizer"]["zero"] == 2 and planned["optimizer"]["offload"] == "cpu"


def test_written_configuration_keeps_what_is_not_planned(tmp_path: Path, capsys: Capture) -> None:
    mine, written = tmp_path / "mine.toml", tmp_path / "planned.toml"
    mine.write_text(
        "[model]\nvocab_size = 384\n[optim]\nlr = 0.007\n[parallel]\nalgorithm = 'chunked'"
    )
    arguments = ["plan", "--model", str(mine), "--machine", "dgx-a100", "--gpus", "2"]
    arguments += ["--global-batch", "4", "--overlap", "off", "--recompute", "every:2"]
    assert main([*arguments, "--write-config", str(written)]) == 0
    assert "recompute every:2" in capsys.readouterr().out
    config = load_config(written)
    assert (config.optim.lr, config.parallel.algorithm) == (0.007, "chunked")
    assert (config.overlap.mode, config.parallel.recompute) == ("off", "every:2")
    assert (config.model.vocab_size, config.model.hidden_size) == (384, 256)


def test_written_configuration_has_fp16_only_if_asked_for(tmp_path: Path) -> None:
    arguments = ["plan", "--model", "gpt2-small", "--machine", "dgx-a100", "--gpus", "2"]
    arguments += ["--global-batch", "4"]
    for asked, dtype in ((["--dtype", "fp16"], "fp16"), ([], "bf16")):
        written = tmp_path / f"{dtype}.toml"
        assert main([*arguments, *asked, "--write-config", str(written)]) == 0
        assert load_config(written).train.dtype == dtype


def test_fixed_options_hold(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    fixed = [
        "--layout",
        "replicated",
        "--micro-batches",
        "4",
        "--recompute",
        "none",
        "--seq",
        "512",
    ]
    assert main([*ON_8, *fixed, "--overlap", "on", "--top", "3", "--json", str(path)]) == 0
    configs = json.loads(path.read_text())["configs"]
    assert 1 <= len(configs) <= 3
    for config in configs:
        assert (config["layout"], config["micro_batches"]) == ("replicated", 4)
        assert config["recompute"] == "none"
        alone = config["grid"]["z"] == config["grid"]["data"] == 1
        assert alone or config["overlap"] is not None


def test_the_numbers_of_overlap_can_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, written = tmp_path / "plan.json", tmp_path / "run.toml"
    given = ["--overlap", "prefetch=3,deferred=5,gathered_bytes=123456789"]
    assert main([*ON_8, *given, "--json", str(path), "--write-config", str(written)]) == 0
    out = capsys.readouterr().out
    configs = json.loads(path.read_text())["configs"]
    z = [c["overlap"] for c in configs if c["overlap"] is not None]
    assert z
    for overlap in z:
        chosen = {name: overlap[name] for name in ("prefetch", "deferred", "gathered_bytes")}
        assert chosen == {"prefetch": 3, "deferred": 5, "gathered_bytes": 123456789}
    assert "overlap (0.115 GiB gathered, 3 ahead, 5 deferred)" in out
    if configs[0]["overlap"] is not None:
        overlap = load_config(written).overlap
        assert (overlap.prefetch, overlap.deferred) == (3, 5)
    for wrong in ("prefetch", "prefetch=x", "prefetch=1,prefetch=2", "ahead=3", "bucket_bytes=0"):
        assert main([*ON_8, "--overlap", wrong]) == 2
        assert "--overlap" in capsys.readouterr().err


PIPED = ("plan", "--model", "gpt2-small", "--machine", "ethernet", "--global-batch", "64")


def test_pipeline_stages_are_planned_when_they_are_asked_for(
    tmp_path: Path, capsys: Capture
) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("json", "timeline")}
    written = tmp_path / "best.toml"
    arguments = [*PIPED, "--gpus", "16", "--pipe", "4", "--explain", "1"]
    arguments += [f"--{name}={path}" for name, path in files.items()]
    assert main([*arguments, f"--write-config={written}"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    configs = json.loads(files["json"].read_text())["configs"]
    best = configs[0]
    assert best["grid"]["pipe"] > 1
    assert best["pipeline"]["schedule"].replace("_", " ") in out
    assert best["bytes_sent"]["pipe"] > 0
    waits = sum(best["exposed_s"].values())
    assert best["compute_s"] + waits == pytest.approx(best["step_time_s"], rel=1e-6)
    share = best["exposed_s"]["pipe"] / best["step_time_s"]
    assert re.search(rf"idles for {share:.1%} of the step \(modelled", out)
    assert all(c["pipeline"] is None for c in configs if c["grid"]["pipe"] == 1)

    config = load_config(written)
    job = prepare(config, world_size=16)
    assert job.config.grid.as_dict() == best["grid"]
    blocks = {"blocks": config.pipeline.blocks}
    assert dataclasses.asdict(config.pipeline) == best["pipeline"] | blocks
    assert job.stages == Stages.balanced(job.model, best["grid"]["pipe"], config.pipeline.chunks)
    assert config.pipeline.blocks == ",".join(str(len(blocks)) for blocks in job.stages.blocks)
    assert (config.train.batch_size, config.train.micro_batches) == (64, best["micro_batches"])

    trace = json.loads(files["timeline"].read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert list(rows.values()) == [f"stage {stage}" for stage in range(best["grid"]["pipe"])]
    spans = [e for e in trace if e["ph"] == "X"]
    for row in rows:
        mine = [(e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == row]
        assert all(a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(mine))
        forwards = [e for e in spans if e["tid"] == row and e["name"].endswith("forward")]
        assert len(forwards) == best["micro_batches"] * config.pipeline.chunks
    longest = max(e["ts"] + e["dur"] for e in spans)
    assert longest / 1e6 == pytest.approx(best["step_time_s"], rel=0.02)
    assert files["timeline"].with_suffix(".png").read_bytes().startswith(PNG)


def test_configuration_without_stages_leaves_none_of_a_trainers_file(tmp_path: Path) -> None:
    """The trainer's file sets the blocks of four stages, which do not fit a grid without stages."""
    mine, written = tmp_path / "mine.toml", tmp_path / "planned.toml"
    mine.write_text(
        "[model]\nvocab_size = 384\nnum_layers = 4\n[grid]\npipe = 4\n"
        "[pipeline]\nblocks = '1,1,1,1'"
    )
    arguments = ["plan", "--model", str(mine), "--machine", "host", "--gpus", "1"]
    arguments += ["--global-batch", "4", "--dtype", "fp32", "--write-config", str(written)]
    assert main(arguments) == 0
    job = prepare(load_config(written), world_size=1)
    assert job.config.grid.size == job.stages.num_virtual == 1


def test_a_schedule_can_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    arguments = [*PIPED, "--gpus", "8", "--pipe", "2", "--schedule", "gpipe", "--top", "100"]
    assert main([*arguments, "--json", str(path)]) == 0
    configs = json.loads(path.read_text())["configs"]
    schedules = {c["pipeline"]["schedule"] for c in configs if c["grid"]["pipe"] > 1}
    assert schedules == {"gpipe"}


def test_tokens_or_sequences(tmp_path: Path) -> None:
    paths = tmp_path / "a.json", tmp_path / "b.json"
    base = ["plan", "--model", "gpt2-small", "--machine", "dgx-a100", "--gpus", "4"]
    assert main([*base, "--global-batch", "32", "--json", str(paths[0])]) == 0
    assert main([*base, "--global-batch-tokens", "32768", "--json", str(paths[1])]) == 0
    assert paths[0].read_text() == paths[1].read_text()


# --- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--gpus", "0"], ["--gpus", "got 0", "gpt2-small", "fits 1 GPU of dgx-a100"]),
        ([], ["expected --gpus", "--sweep or --series"]),
        (["--gpus", "8", "--machine", "dgx-a1000"], ["dgx-a1000", "dgx-a100", "frontier"]),
        (["--gpus", "8", "--model", "gpt-80c"], ["gpt-80c", "did you mean", "gpt-80b"]),
        (["--gpus", "8", "--model", "gpt-640b"], ["gpt-640b", "memory", "would do"]),
        (["--gpus", "7"], ["7 GPUs", "not divisible", "would do"]),
        (["--gpus", "8", "--global-batch", "0"], ["--global-batch", ">= 1", "got 0"]),
        (["--gpus", "8", "--global-batch", "1.5"], ["--global-batch", "whole number", "got 1.5"]),
        (["--gpus", "8", "--tokens", "nan"], ["--tokens", "> 0", "nan"]),
        (["--gpus", "8", "--memory-fraction", "0"], ["--memory-fraction", "> 0 and <= 1"]),
        (["--gpus", "8", "--plot", "a.gif"], ["--plot", ".png", "a.gif"]),
        (["--gpus", "8", "--timeline", "a.txt"], ["--timeline", ".json", "a.txt"]),
        (["--gpus", "8", "--timeline", "a.json", "--plot", "a.png"], ["a.png", "twice"]),
        (["--gpus", "8", "--json", "/nowhere/a.json"], ["--json", "/nowhere"]),
        (["--gpus", "8", "--schedule", "1f1b"], ["--schedule", "give --pipe"]),
        (["--gpus", "8", "--pipe", "0"], ["--pipe", ">= 1", "got 0"]),
        (["--gpus", "8", "--recompute", "on"], ["--recompute", "every:K", "full", "got 'on'"]),
        (["--gpus", "2", "--explain", "99"], ["--explain", "at most", "got 99"]),
        (["--gpus", "8", "--gird", "2"], ["unknown argument --gird"]),
    ],
)
def test_mistakes(arguments: list[str], expected: list[str], capsys: Capture) -> None:
    assert main([*SMALL, *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert all(text in message for text in expected), message


def test_batch_tokens_that_are_no_whole_sequences(capsys: Capture) -> None:
    base = ["plan", "--model", "gpt2-small", "--machine", "dgx-a100", "--gpus", "4"]
    assert main([*base, "--global-batch-tokens", "5000"]) == 2
    assert "multiple of the sequence length 1024, such as 4096, got 5000" in capsys.readouterr().err


def test_bandwidth_that_is_no_number(tmp_path: Path, capsys: Capture) -> None:
    known = ROOT / "axonn_ext" / "planner" / "machines" / "dgx-a100.toml"
    path = tmp_path / "broken.toml"
    path.write_text(re.sub(r"(?m)^bytes_per_s = \S+", "bytes_per_s = nan", known.read_text()))
    assert main([*ON_8, "--machine", str(path)]) == 2
    message = capsys.readouterr().err
    assert all(text in message for text in ("broken.toml", "bytes_per_s", "nan")), message


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from axonn_ext.cli.plan import command

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one process, got 2"):
        command.run(command.argparse.Namespace())
