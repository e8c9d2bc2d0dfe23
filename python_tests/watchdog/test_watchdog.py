"""A missing rank is named, with axis, op and number of the call, wherever it hangs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from axonn_ext import _C, GridShape, ops
from axonn_ext.overlap.host_lane import HostLane
from axonn_ext.overlap.watch import Watch
from axonn_ext.ranks import collectives
from axonn_ext.ranks.launch.bell import Bell
from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.launch.signals import SignalListener
from axonn_ext.train.watchdog.summary import (
    HANGS,
    SIGNAL,
    SUMMARY_FILE,
    reason_for_failure,
    summaries,
)
from axonn_ext.train.watchdog.watchdog import Times, Watchdog
from commands import environment, wait_until, workers_of
from grids import grid_of
from kills import command, losses
from limits import HANG_SECONDS

pytestmark = pytest.mark.long

KINDS = ("fused", "c10d", "overlap")
# Each axis hangs in one kind of call, and the axis of four ranks in every kind.
SHAPES = [
    *(GridShape(**{axis: 2}) for axis in ("x", "y", "z", "data")),
    *(GridShape(x=2, y=2), GridShape(x=4), GridShape(x=4, data=2)),
    *(
        pytest.param(shape, marks=pytest.mark.slow)
        for shape in (
            *(GridShape(z=2, data=2), GridShape(data=4)),
            *(GridShape(x=2, y=2, z=2), GridShape(y=2, z=2, data=2)),
        )
    ),
]


def call(grid, axis: str, kind: str, lanes: dict[str, HostLane]) -> None:
    if kind == "overlap":
        lanes[axis].all_reduce(torch.ones(8), "gradients").wait()
    elif kind == "fused":
        ops.matmul_all_reduce(torch.ones(4, 4), torch.ones(4, 4), grid.group(axis))
    else:
        collectives.reduce_from(torch.ones(8), grid.axis(axis), algorithm="sequential")


def hang_here(folder: Path) -> None:
    """Returns when there is a summary. It calls no Python function, so its stack ends here."""
    hangs, deadline = str(folder / HANGS), time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        for name in os.listdir(hangs) if os.access(hangs, os.F_OK) else ():
            if os.access(f"{hangs}/{name}/{SUMMARY_FILE}", os.F_OK):
                return
        time.sleep(0.05)


def hang(shape: GridShape, axis: str, culprit: int, kind: str, folder: Path) -> list[str]:
    """Makes three calls on each axis, then one more on `axis`, for which rank `culprit` is late."""
    grid = grid_of(shape)
    axes = [name for name in shape.as_dict() if grid.size(name) > 1]
    lanes = {}
    if kind == "overlap":
        for name in axes:
            watch = Watch(grid.axis(name), timeout_s=HANG_SECONDS, compare=False)
            lanes[name] = HostLane(grid.axis(name), _C.Lanes(), watch)
    for name in 3 * axes:
        call(grid, name, kind, lanes)
    store = dist.PrefixStore(str(folder), dist.distributed_c10d._get_default_store())
    lines: list[str] = []
    process = Process(grid.rank, grid.world_size, grid.world_size)
    bell = Bell(store, process)
    watchdog = Watchdog(bell, process, folder, times=Times(2.0, 30.0), say=lines.append)
    orchestrator = SimpleNamespace(progress=lambda: {a: lane.progress for a, lane in lanes.items()})
    watchdog.orchestrators = (orchestrator,)
    with bell, watchdog:
        dist.barrier()  # so that only the culprit is late for the call
        if grid.rank == culprit:
            hang_here(folder)
        call(grid, axis, kind, lanes)
        dist.barrier()
    return lines


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_hang_on_each_axis_names_rank_axis_and_op(shape, pool, tmp_path) -> None:
    for number, (axis, size) in enumerate(shape.as_dict().items()):
        kinds = KINDS if size == 4 else [KINDS[(number + shape.size) % 3]]
        for kind in kinds if size > 1 else []:
            culprit, folder = (5 * number + 3) % shape.size, tmp_path / axis / kind
            said = pool(shape.size).run(hang, shape, axis, culprit, kind, folder)
            lines = [line for lines in said for line in lines]
            assert len(lines) == 1, "one rank says it, once"
            check_line(lines[0], axis, kind, culprit, shape.size)


def check_line(line: str, axis: str, kind: str, culprit: int, world_size: int) -> None:
    found = re.fullmatch(
        r"rank (\d+) holds the job up: rank (\d+) has waited for it for [\d.]+ s in (.*), call "
        r"(\d+) of axis (\w+) \(ranks ([\d, ]+)\)\. It is at (.*) \(reports: (.*)\)",
        line,
    )
    assert found, line
    members = [int(rank) for rank in found[6].split(", ")]
    assert int(found[1]) == culprit and int(found[2]) in members and culprit in members
    ops_named = {"fused": "matmul_all_reduce", "c10d": "all_reduce"}
    assert found[3] == ops_named.get(kind, "all_reduce of gradients (8 float32 per rank)")
    assert found[5] == axis
    assert found[7].startswith("watchdog/test_watchdog.py:")
    assert found[7].endswith(" in hang_here")
    folder, number = Path(found[8]), int(found[4])
    assert (folder / SUMMARY_FILE).read_text().strip() == line
    for rank in range(world_size):
        text = (folder / f"rank-{rank}.txt").read_text()
        assert f"rank {rank}, host" in text
        waits = rank in members and rank != culprit
        assert (f"call {number} of axis" in text) == waits == (f"    in {found[3]}" in text)
        place = re.search(r"^at (\S+):\d+ in (\S+)$", text, re.MULTILINE)
        assert place, text
        assert (place[2] == "hang_here") == (rank == culprit)
        if not waits and rank != culprit:
            assert place[2] == "hang", "in the barrier after the call"


def wait_on_two_axes(folder: Path) -> list[str]:
    """Rank 3 is late on x, so rank 2 is late on y: rank 0 waits for rank 2, and 2 for 3."""
    grid = grid_of(GridShape(x=2, y=2))
    for axis in ("x", "y"):
        call(grid, axis, "fused", {})
    store = dist.PrefixStore(str(folder), dist.distributed_c10d._get_default_store())
    lines: list[str] = []
    here = Process(grid.rank, 4, 4)
    bell = Bell(store, here)
    dog = Watchdog(bell, here, folder, times=Times(2.0, 30.0), say=lines.append)
    with bell, dog:
        dist.barrier()
        if grid.rank == 3:
            hang_here(folder)
        if grid.rank in (2, 3):
            call(grid, "x", "fused", {})
        if grid.rank in (0, 2):
            call(grid, "y", "fused", {})
        dist.barrier()
    return lines


def test_a_rank_that_waits_itself_is_not_blamed(pool, tmp_path) -> None:
    (line,) = [line for lines in pool(4).run(wait_on_two_axes, tmp_path) for line in lines]
    assert line.startswith("rank 3 holds the job up: rank 2 has waited for it")
    assert "of axis x (ranks 2, 3)" in line


def test_a_step_that_does_not_end_is_noticed(tmp_path) -> None:
    lines: list[str] = []
    bell = Bell(HashStore(), Process())
    dog = Watchdog(bell, Process(), tmp_path, times=Times(2.0, 5.0), say=lines.append)
    with bell, dog:
        time.sleep(1.2)
        dog.step_ended()
        time.sleep(1.2)
        assert not lines
        hang_here(tmp_path)
    (path,) = (tmp_path / HANGS).glob("*/rank-0.txt")
    assert "Rank 0 asked all ranks for reports: no step of it has ended for 2." in path.read_text()
    assert "in hang_here" in path.read_text()
    assert len(lines) == 1 and lines[0].startswith("no rank has waited for another for 1 s")


def test_a_signal_asks_and_the_process_goes_on(tmp_path) -> None:
    lines: list[str] = []
    before = signal.getsignal(SIGNAL)
    times = Times(60.0, 5.0)
    bell = Bell(HashStore(), Process())
    watchdog = Watchdog(bell, Process(), tmp_path, times=times, say=lines.append)
    with bell, watchdog, SignalListener({SIGNAL: watchdog.hear}):
        for count in (1, 2):
            time.sleep(2.5 * (count - 1))  # signals in quick succession count as one request
            os.kill(os.getpid(), SIGNAL)
            os.kill(os.getpid(), SIGNAL)
            wait_until(lambda: len(summaries(tmp_path)) >= count, "an answer")  # noqa: B023
    assert len(lines) == len(summaries(tmp_path)) == 2
    assert signal.getsignal(SIGNAL) == before


def one_writes_nothing_and_one_has_ended(folder: Path) -> list[str]:
    """Rank 2 of 4 cannot write; rank 3 has left when rank 0 requests reports."""
    grid = grid_of(GridShape(x=4))
    store = dist.PrefixStore(str(folder), dist.distributed_c10d._get_default_store())
    lines: list[str] = []
    if grid.rank == 2:
        folder = folder / "file"
        folder.write_text("")
    here = Process(grid.rank, 4, 4)
    bell = Bell(store, here)
    watchdog = Watchdog(bell, here, folder, times=Times(60.0, 30.0), say=lines.append)
    with bell, watchdog:
        if grid.rank == 3:
            return lines
        store.wait(["watchdog/left/3"])
        if grid.rank == 0:
            watchdog.hear(SIGNAL)
            hang_here(folder)
        else:
            store.wait([f"watchdog/0/report/{grid.rank}"])
            time.sleep(0.5)
    return lines


def test_a_rank_that_cannot_write_or_has_ended_is_not_accused(pool, tmp_path) -> None:
    said = pool(4).run(one_writes_nothing_and_one_has_ended, tmp_path)
    assert said[0][0].startswith("no rank has waited for another for 1 s (reports:")
    assert len(said[2]) == 1 and said[2][0].startswith("cannot write ")
    assert said[1] == said[3] == []


def test_only_a_fresh_report_of_a_hang_is_the_reason_of_a_failure(tmp_path) -> None:
    def write(name: str, *, age: float = 0.0) -> Path:
        path = tmp_path / HANGS / name / SUMMARY_FILE
        path.parent.mkdir(parents=True)
        path.write_text(f"{name}\n")
        os.utime(path, (time.time() - age,) * 2)
        return path

    known = {write("before")}
    assert reason_for_failure(tmp_path, known=known) is None
    write("asked-for-asked")
    write("long-ago", age=3600)
    assert reason_for_failure(tmp_path, known=known) is None
    write("hang")
    assert reason_for_failure(tmp_path, known=known) == "hang"


@pytest.mark.slow
def test_the_last_lines_of_a_job_say_who_held_it_up(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("AXONN_TIMEOUT_SECONDS", "12")
    folder = tmp_path / "run"
    job = subprocess.Popen(
        command(folder, "--train.steps", "1000000", "--grid", "2x1x2"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(lambda: len(workers_of(job.pid)) == 4, "four ranks")
        job.send_signal(SIGNAL)  # too early for an answer, but must not end the job
        wait_until(lambda: len(losses(folder)) > 2, "three steps")
        job.send_signal(SIGNAL)
        wait_until(lambda: bool(summaries(folder)), "an answer")
        steps = len(losses(folder))
        wait_until(lambda: len(losses(folder)) > steps, "a step after the answer")
        stopped = workers_of(job.pid)[2]
        os.kill(stopped, signal.SIGSTOP)
        wait_until(lambda: len(workers_of(job.pid)) < 4, "a rank that gives up")
        os.kill(stopped, signal.SIGKILL)  # as the agent would do 30 s later
        output, _ = job.communicate(timeout=HANG_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 1
    error, how = output.strip().splitlines()[-2:]
    assert re.match(r"error: rank 2 holds the job up: rank [03] has waited for it for \d+\.", error)
    assert "It has given no report: it may have been stopped, its network may be down" in error
    assert " (pid " in how
    assert "Traceback" not in output


STUCK = """
import signal, sys, threading
from axonn_ext.cli.main import end_process, main
from axonn_ext.train import worker

def stuck(**sizes):
    print("in no grid", flush=True)
    threading.Event().wait()

if sys.argv.pop(1) == "1":
    worker.Grid = stuck
end_process(main(sys.argv[1:]))
"""


def test_a_rank_that_waits_as_groups_are_made_is_watched(tmp_path) -> None:
    """Rank 1 makes no grid, so rank 0 waits for it there."""
    folder, ranks = tmp_path / "run", []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    for rank in ("0", "1"):
        variables = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", STUCK, rank, *command(folder, "--grid", "x=2")[3:]],
                env=environment() | variables | {"MASTER_PORT": str(port)},
                stdout=subprocess.PIPE if rank == "1" else None, text=True,
            )
        )  # fmt: skip
    try:
        assert ranks[1].stdout.readline() == "in no grid\n"
        ranks[0].send_signal(SIGNAL)
        wait_until(lambda: bool(summaries(folder)), "a report")
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    [report] = folder.glob(f"{HANGS}/*/rank-0.txt")
    where = r"^at ranks/(meeting|grid|side_groups|stores)\.py:"
    assert re.search(where, report.read_text(), re.M)
