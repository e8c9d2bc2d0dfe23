"""A training's ranks load little more than torch, since thousands may read the same disks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from commands import environment, small
from limits import HANG_SECONDS

CEILING = 1.2  # times the files and stat calls of importing only torch
# Counts the files that Python opens, each module once whether or not its bytecode is cached, and
# the stat calls of imports.
COUNT = """
import importlib._bootstrap_external, os, re, sys
names, stats, stat = set(), [], importlib._bootstrap_external._path_stat
importlib._bootstrap_external._path_stat = lambda path: stats.append(path) or stat(path)
def hook(event, arguments):
    if event == "open":
        name = re.sub(r"__pycache__/([^/]+)\\.[^.]+\\.pyc$", r"\\1.py", str(arguments[0]))
        names.add(os.path.abspath(name))
sys.addaudithook(hook)
"""
TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weight = torch.ones(2, requires_grad=True)
weight.sum().backward()
dist.all_reduce(weight.grad, group=dist.new_group([0]))
"""
RANK = """
from axonn_ext.cli.main import main
assert main(sys.argv[2:]) == 0
"""
TELL = """
with open(sys.argv[1], "w") as file:
    print(*names, sep="\\n", file=file)
    print(*(f"module {name}" for name in sys.modules), sep="\\n", file=file)
    print("stats", len(stats), file=file)
"""
UNUSED = (
    "axonn_ext.pipeline", "axonn_ext.planner", "jinja2", "pandas", "rich", "sympy", "torch._dynamo",
    "torch.distributed.checkpoint", "torch.distributed.tensor", "transformers",
)  # fmt: skip


def start(program: str, out: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COUNT + program + TELL, str(out), *arguments],
        env=environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.long
def test_a_rank_opens_few_more_files_than_torch(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}  # fmt: skip
    (tmp_path / "text").write_bytes(os.urandom(20_000).hex().encode())
    train = ("train", "--out", str(tmp_path / "run"), "--grid", "x=2",
             *small(data__text=str(tmp_path / "text"), checkpoint__interval=3))  # fmt: skip
    started = [start(TORCH, tmp_path / "torch")]
    started += [start(RANK, tmp_path / f"rank{r}", *train, RANK=str(r), **place) for r in range(2)]
    for process in started:
        output, _ = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 0, output
    torch, rank = (set((tmp_path / name).read_text().splitlines()) for name in ("torch", "rank1"))
    loaded = [name for name in UNUSED if f"module {name}" in rank]
    assert not loaded, "what a rank that is not the first has no use for"
    own = (str(tmp_path), "module ", "stats ")  # the run's own files do not count
    files = [sum(not line.startswith(own) for line in lines) for lines in (torch, rank)]
    stats = [
        next(int(line[6:]) for line in lines if line[:6] == "stats ") for lines in (torch, rank)
    ]
    print(f"{files[1]} files and {stats[1]} stats, torch alone {files[0]} and {stats[0]}")
    assert files[1] <= CEILING * files[0], sorted(rank - torch)
    assert stats[1] <= CEILING * stats[0]
