"""`axonn-ext train --grid auto`: the planner's grid, the same on all ranks."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import threading
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from axonn_ext.calibrate.find_machine import machine_of_gpu
from axonn_ext.cli import main
from axonn_ext.cli.train import _worker_arguments
from axonn_ext.planner import load_machine, plan
from axonn_ext.planner.machines.machine import machine_file, machine_names
from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.launch.process import settled_by_rank_0
from axonn_ext.spec.files.files import read_toml
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.auto_grid import choose_grid, machine_here, make_request
from axonn_ext.train.config_file import Override, load_config
from axonn_ext.train.job import prepare
from limits import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]


def test_auto_grid_is_the_planners_for_the_options_as_they_are() -> None:
    options = {"layout": "replicated", "recompute": "every:2"}
    overrides = [Override(f"parallel.{name}", text) for name, text in options.items()]
    config = load_config(None, overrides=(*overrides, Override("train.micro_batches", "2")))
    request = make_request(config, 4, load_machine("host"))
    assert (request.layouts, request.micro_batches) == (("replicated",), (2,))
    assert request.fixed["recompute"] == "every:2" and request.fixed["overlap"] is None
    result = plan(dataclasses.replace(request, top=100))
    choice = choose_grid(config, world_size=4, machine="host")
    assert choice.grid == result.configs[0].job.grid and choice.grid.size == 4
    assert choice.num_grids == result.fits == len(result.configs)
    assert choice == choose_grid(config, world_size=4, machine="host")
    with_grid = load_config(None, grid=str(choice.grid), overrides=tuple(overrides))
    prepare(with_grid, world_size=4)
    assert request.model.num_parameters() == prepare(with_grid, world_size=4).model.num_parameters()


@pytest.mark.parametrize(
    ("gpu", "machine"),
    [
        ("NVIDIA GH200 120GB", "alps"), ("NVIDIA H200", "dgx-h200"),
        ("NVIDIA H100 80GB HBM3", "dgx-h100"), ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
        ("NVIDIA A100-SXM4-40GB", "perlmutter"), ("AMD Instinct MI250X", "frontier"),
        ("NVIDIA B200", "dgx-b200"), ("NVIDIA GB200", "gb200-nvl72"),
        ("AMD Instinct MI300X OAM", "mi300x"), ("NVIDIA RTX A6000", None),
    ],
)  # fmt: skip
def test_machine_with_such_gpus(gpu: str, machine: str | None) -> None:
    assert machine_of_gpu(gpu) == machine
    assert machine is None or machine in machine_names()


def test_no_two_machines_claim_the_same_gpu() -> None:
    claimed = [read_toml(machine_file(name)).get("gpu") for name in machine_names()]
    gpus = [gpu for gpu in claimed if gpu]
    assert gpus and len(set(gpus)) == len(gpus)


def test_machine_that_was_measured_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AXONN_CACHE_DIR", str(tmp_path))
    generic, note = machine_here("cpu", "fp32", 4)
    assert (generic.name, note) == ("host", "a generic machine") and "host" in machine_names()
    assert generic.memory_bytes == physical_memory() // 4
    measured = tmp_path / "machines" / "this.toml"
    measured.parent.mkdir()
    known = ROOT / "axonn_ext" / "planner" / "machines" / "host.toml"
    measured.write_text(known.read_text().replace("bytes_per_s = 3e9", "bytes_per_s = 3e6"))
    slow = choose_grid(load_config(None), world_size=4, machine=None)
    assert (slow.machine, slow.note) == ("this", "")
    assert slow.describe().endswith("grids that fit")
    usual = choose_grid(load_config(None), world_size=4, machine="host")
    assert slow.step_time_s > 2 * usual.step_time_s


def physical_memory() -> int:
    """The memory that Linux reports, which may reserve some pages for itself."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('device = "cpu"', 'device = "cuda"', "is of cuda, not cpu"),
        (r"(?m)^fp32 = .*\n|, fp32 = 0\.7", "", "has bf16 and fp16, not fp32"),
        (r"\[\[levels\]\]", "[[levels]]\nranks = 3", "has 3 ranks, not 4"),
    ],
)
def test_a_measured_machine_of_another_kind_of_job_is_not_taken(
    old: str, new: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AXONN_CACHE_DIR", str(tmp_path))
    measured = tmp_path / "machines" / "this.toml"
    measured.parent.mkdir()
    known = ROOT / "axonn_ext" / "planner" / "machines" / "host.toml"
    text = re.sub(r"(?m)^ranks = .*\n", "", known.read_text())
    assert re.search(old, text)
    measured.write_text(re.sub(old, new, text))
    choice = choose_grid(load_config(None), world_size=4, machine=None)
    assert choice.machine == "host"
    note = f"(a generic machine; not the measured one, which {problem})"
    assert choice.describe().endswith(note), choice.describe()


@pytest.mark.parametrize(
    ("gpu", "name", "note"),
    [
        ("NVIDIA RTX A6000", "ethernet", "a generic machine: NVIDIA RTX A6000 is not known"),
        ("NVIDIA H200", "dgx-h200", ""),
    ],
)
def test_gpus_have_the_memory_that_the_driver_tells(
    gpu: str, name: str, note: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AXONN_CACHE_DIR", str(tmp_path))
    properties = types.SimpleNamespace(total_memory=48_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    machine, said = machine_here("cuda", "bf16", 16)
    assert (machine.name, said, machine.memory_bytes) == (name, note, 48_000_000_000)
    assert 0 < machine.memory_reserved_bytes < load_machine(name).memory_reserved_bytes


def test_memory_is_what_there_is_unless_a_machine_was_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config(None)
    name = "axonn_ext.train.auto_grid._memory_bytes"
    monkeypatch.setattr(name, lambda device, ranks: 1_000_000)
    with pytest.raises(UserError, match="memory"):
        choose_grid(config, world_size=4, machine=None)
    assert choose_grid(config, world_size=4, machine="host").note == ""


def test_auto_grid_of_the_command(capsys: Capture) -> None:
    arguments = ["train", "--grid", "auto", "--nproc", "4", "--machine", "host", "--print-config"]
    assert main(arguments) == 0
    sizes = tomllib.loads(capsys.readouterr().out)["grid"]
    assert math.prod(sizes.values()) == 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["--grid auto", "--nproc", "torchrun"]),
        (["--nproc", "0"], ["--nproc", "got 0"]),
        (["--nproc", "2", "--grid.x", "2"], ["--grid auto", "leave out --grid.x"]),
        (["--nproc", "2", "--machine", "abacus"], ["--grid auto", "abacus", "perlmutter"]),
        (["--nproc", "2", "--model.implementation", "plain"], ["--grid auto", "plain"]),
        (["--nproc", "7", "--machine", "host"], ["--grid auto", "7 ranks", "would do"]),
        (
            ["--nproc", "2", "--parallel.heads_over_y", "true", "--parallel.layout", "replicated"],
            ["heads_over_y", "sharded"],
        ),
    ],
)
def test_auto_grid_mistakes(arguments: list[str], expected: list[str], capsys: Capture) -> None:
    assert main(["train", "--grid", "auto", *arguments]) == 2
    message = capsys.readouterr().err
    assert all(text in message for text in expected), message


def test_machine_without_auto_is_refused(capsys: Capture) -> None:
    assert main(["train", "--grid", "x=1", "--machine", "host"]) == 2
    assert "--machine" in capsys.readouterr().err


@pytest.mark.parametrize("fails", [False, True])
def test_all_ranks_take_the_grid_of_rank_0(fails: bool) -> None:
    store, found = HashStore(), dict[int, str]()

    def settle(rank: int) -> str:
        if fails and rank == 0:
            raise UserError("no such machine")
        return f"x={rank + 2}"

    def take_part(rank: int) -> None:
        try:
            found[rank] = settled_by_rank_0(
                store, Process(rank, 3, 3), lambda: settle(rank), topic="grid"
            )
        except UserError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HANG_SECONDS)
    others = "stopping, because of the mistake that rank 0 reports"
    expected = ["no such machine", others, others] if fails else ["x=2"] * 3
    assert [found[rank] for rank in range(3)] == expected


def test_processes_that_are_started_get_the_chosen_grid(tmp_path: Path) -> None:
    args = axonn_ext_arguments("--grid", "auto", "--nproc", "4", "--machine", "host")
    config = load_config(None, grid="x=2,z=2")
    given = _worker_arguments(args, config, tmp_path, ())
    assert given[given.index("--grid") + 1] == "x=2,y=1,z=2,data=1,pipe=1"
    assert "auto" not in given and "--machine" not in given


def axonn_ext_arguments(*arguments: str) -> Any:
    from axonn_ext.cli.main import _parser

    args, _ = _parser(["train"]).parse_known_args(["train", *arguments])
    return args


def test_of_a_run_in_fp16() -> None:
    config = load_config(None, overrides=(Override("train.dtype", "fp16"),))
    assert choose_grid(config, world_size=4, machine="host").grid.size == 4
