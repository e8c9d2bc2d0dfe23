"""`[train] verify`: which ranks run `axonn-ext verify`, when, and how the others wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore

import commands
from axonn_ext.kernels import extension, verified
from axonn_ext.kernels.verified import Stamp, Verdict
from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.launch.process import once_per_host
from axonn_ext.spec import settings
from axonn_ext.spec.settings import worker_environment
from axonn_ext.train import kernels, run
from axonn_ext.train.config_file import Override, load_config
from limits import HANG_SECONDS
from pretend_gpus import H100_NAME, pretend_gpus
from stamp_cases import H100, RIGHT
from trained_here import train_here
from verify_on_cpu import verify_command

pytestmark = pytest.mark.long

ALL = ("fused=passes", "fused_sm90=passes")
GOES_ON = "training goes on without the kernels that are not verified"
STARTED = "checking the GPU kernels by `axonn-ext verify`, as train.verify asks"


# --- Four ranks on two hosts, each with a folder of its own ---------------------------------------


def take_part(folder: str, topic: str, *cases: str) -> dict[str, Any]:
    """A rank's messages, and the hosts that have a stamp when it continues."""
    rank = dist.get_rank()
    here = Process(rank, 4, 2)
    caches = [Path(folder) / f"host{host}" for host in range(2)]
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AXONN_CACHE_DIR", str(caches[rank // 2]))
        kernels.verify_where_unknown(
            PrefixStore(topic, dist.distributed_c10d._get_default_store()), here,
            is_unknown=lambda: verified.find(settings.load().cache_dir, H100) is None,
            say=said.append, command=verify_command(*cases),
        )  # fmt: skip
        found = [verified.find(cache, H100) for cache in caches]
    return {"said": said, "verdicts": [stamp and dict(stamp.verdicts) for stamp in found]}


def test_a_process_of_each_host_verifies_and_the_others_wait(pool, tmp_path: Path):
    found = pool(4).run(take_part, str(tmp_path), "each", *ALL)
    right = {"fused": Verdict(), "fused_sm90": Verdict()}
    assert [rank["verdicts"] for rank in found] == [[right, right]] * 4
    name = os.uname().nodename
    begun = f"{name}: {STARTED}"
    assert [rank["said"] for rank in found] == [[begun], [], [begun], []]

    again = pool(4).run(take_part, str(tmp_path), "again", *ALL)
    assert [rank["said"] for rank in again] == [[]] * 4, "nothing is run twice"


def test_a_host_that_has_a_stamp_waits_for_one_that_has_none(pool, tmp_path: Path):
    verified.keep(tmp_path / "host0", Stamp(H100, RIGHT))
    found = pool(4).run(take_part, str(tmp_path), "one", *ALL)
    assert [len(rank["said"]) for rank in found] == [0, 0, 1, 0]
    assert all(rank["verdicts"][1] is not None for rank in found)


def test_wrong_kernels_are_told_and_not_used(pool, tmp_path: Path):
    found = pool(4).run(take_part, str(tmp_path), "wrong", "fused=fails", "fused_sm90=passes")
    said = (
        f"{os.uname().nodename}: `axonn-ext verify` found wrong kernels or was stopped; {GOES_ON}"
    )
    assert [rank["said"][1:] for rank in found] == [[said], [], [said], []]
    for verdicts in found[3]["verdicts"]:
        assert not verdicts["fused"].passed and verdicts["fused_sm90"].passed


# --- The command fails ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["sh", "-c", "kill -KILL $$"], f"`axonn-ext verify` was killed by SIGKILL; {GOES_ON}"),
        (["sh", "-c", "exit 7"], f"`axonn-ext verify` ended with status 7; {GOES_ON}"),
        (["/no/such/program"], "`axonn-ext verify` cannot be started: "),
        pytest.param(
            kernels.VERIFY, f"`axonn-ext verify` ended with status 2; {GOES_ON}",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)  # fmt: skip
def test_a_failure_of_the_command_is_told(command: list[str], problem: str):
    said: list[str] = []
    kernels.verify_where_unknown(
        HashStore(), Process(), is_unknown=lambda: True, say=said.append, command=command
    )
    assert said[0] == STARTED and said[1].startswith(problem)


def test_a_command_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "MOST_SECONDS", 1.0)
    monkeypatch.setattr(kernels, "SIGN_SECONDS", 0.1)
    monkeypatch.setattr(kernels, "END_SECONDS", 0.1)
    said: list[str] = []
    program = f"trap '' TERM; echo $$ > {tmp_path}/pid; while true; do sleep 0.1; done"
    kernels.verify_where_unknown(
        HashStore(), Process(), is_unknown=lambda: True, say=said.append,
        command=["sh", "-c", program],
    )  # fmt: skip
    assert said[1] == f"`axonn-ext verify` had not ended after 1 s; {GOES_ON}"
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


# --- Ranks that wait ------------------------------------------------------------------------------

# One of two ranks; its arguments are the port, the rank and the command.
RANK = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from axonn_ext.ranks.launch.place import Process
from axonn_ext.terminal.errors import MeetingError
from axonn_ext.train.kernels import verify_where_unknown
port, rank, *command = sys.argv[1:]
store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=60))
here = Process(int(rank), 2, 2)
try:
    verify_where_unknown(store, here, is_unknown=lambda: True, say=print, command=command)
except MeetingError as error:
    print(error)
    sys.exit(2)
"""


def start_ranks(
    store: TCPStore, command: list[str], timeout_s: float
) -> list[subprocess.Popen[str]]:
    environment = worker_environment(AXONN_TIMEOUT_SECONDS=str(timeout_s))
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(store.port), str(rank), *command],
            env=environment, stdout=subprocess.PIPE, text=True, cwd=commands.ROOT,
        )
        for rank in range(2)
    ]  # fmt: skip


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_ranks_wait_longer_than_for_a_peer_while_it_is_alive(store: TCPStore):
    """The command takes more than twice the time limit for a sign of life."""
    ranks = start_ranks(store, ["sh", "-c", "sleep 11"], timeout_s=5)
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert outputs == [f"{STARTED}\n", ""]


def test_all_ranks_wait_for_the_last_of_several_hosts(store: TCPStore):
    """There are two hosts, with one rank and with three; the second one finishes later."""
    hosts = {0: 1, 1: 3, 2: 3, 3: 3}
    first_is_done, worked = threading.Event(), []

    def run(rank: int) -> list[int]:
        client = TCPStore("127.0.0.1", store.port, is_master=False)

        def work(alive: Callable[[], None]) -> None:
            if rank != 0:
                assert first_is_done.wait(HANG_SECONDS)
                time.sleep(0.2)  # the first host would return now if it did not wait
            worked.append(rank)
            first_is_done.set()

        once_per_host(client, Process(rank, 4, hosts[rank]), work, topic="test")
        return list(worked)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(run, hosts)) == [[0, 3]] * 4


def test_ranks_do_not_wait_for_one_that_is_gone_nor_does_its_command(
    store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VERIFY_TARGETS_FOLDER", str(tmp_path))
    ranks = start_ranks(store, verify_command("fused=hangs"), timeout_s=3)
    try:
        target = tmp_path / "started"
        commands.wait_until(lambda: target.exists() and target.read_text() != "", "the target")
        worker = int(target.read_text())
        verify = parent_of(worker)
        assert parent_of(verify) == ranks[0].pid
        ranks[0].send_signal(signal.SIGKILL)
        output = ranks[1].communicate(timeout=300)[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[1].returncode == 2
    assert "no word of rank 0 after 3 s (AXONN_TIMEOUT_SECONDS)" in output
    for process in (verify, worker):
        commands.wait_until(lambda pid=process: not is_running(pid), "the end of the command")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_running(pid: int) -> bool:
    """Whether a process is running; a zombie, which we may not reap, is not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# --- A job ----------------------------------------------------------------------------------------


def job(device: str = "cuda", **changes: str) -> Any:
    """The parts of a job that matter for its kernels."""
    overrides = [Override("train.verify", changes.pop("verify", "auto"))]
    overrides += [Override(key.replace("__", "."), text) for key, text in changes.items()]
    config = load_config(None, grid="x=2", overrides=tuple(overrides))
    return SimpleNamespace(config=config, device=device, dtype=torch.bfloat16)


def settle(folder: str, topic: str) -> tuple[str, list[str], int]:
    """The line about locked kernels, the messages, and the number of ranks "auto" may fuse for."""
    here, said = Process(dist.get_rank(), 2, 2), list[str]()
    store = PrefixStore(topic, dist.distributed_c10d._get_default_store())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AXONN_CACHE_DIR", folder)
        pretend_gpus(patch, [H100_NAME] * 2)
        patch.setattr(extension, "stamp_keys", lambda: [H100])  # the key that verify_on_cpu.py uses
        line = kernels.settle_kernels(
            job(), store, here, say=said.append, command=verify_command(*ALL)
        )
        ranks = extension.find_unlocked(settings.load()).fused_ranks
    extension.configure(settings.load())
    return line, said, ranks


def test_a_job_begins_with_what_is_right_on_all_ranks(pool, tmp_path: Path):
    [(line, said, ranks), other] = pool(2).run(settle, str(tmp_path), "first")
    assert (said, ranks) == ([STARTED], 1)
    assert line.startswith("fused kernels: verified on 1 GPU of 2; `axonn-ext verify`")
    assert other == ("", [], 1)
    [(again, said, _), other] = pool(2).run(settle, str(tmp_path), "second")
    assert (again, said) == (line, []) and other == ("", [], 1)


@pytest.mark.parametrize(
    ("changes", "stamp", "runs"),
    [
        ({}, None, True),
        ({}, Stamp(H100, {"triton": Verdict()}, complete=False), True),
        ({}, Stamp(H100, {"triton": Verdict()}), False),  # another run would find nothing new
        ({}, Stamp(H100, RIGHT, complete=False), False),  # nothing is locked
        ({"verify": "off"}, None, False),
        ({"parallel__algorithm": "sequential"}, None, False),
        ({"model__implementation": "plain"}, None, False),
        ({"device": "cpu"}, None, False),
    ],
)
def test_when_a_job_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], stamp: Stamp | None,
    runs: bool,
):  # fmt: skip
    monkeypatch.setenv("AXONN_CACHE_DIR", str(tmp_path))
    if stamp is not None:
        verified.keep(tmp_path, stamp)
    pretend_gpus(monkeypatch, [H100_NAME] * 2)
    monkeypatch.setattr(extension, "stamp_keys", lambda: [H100])
    monkeypatch.setattr(extension, "configure", lambda loaded, suggest_verify: None)
    said: list[str] = []
    kernels.settle_kernels(
        job(**changes), HashStore(), Process(), say=said.append,
        command=["sh", "-c", f"touch {tmp_path}/ran"],
    )  # fmt: skip
    assert ((tmp_path / "ran").exists(), said != []) == (runs, runs)


def test_without_a_folder_for_stamps_nothing_is_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AXONN_CACHE_DIR", "")
    pretend_gpus(monkeypatch)
    monkeypatch.setattr(extension, "configure", lambda loaded, suggest_verify: None)
    said: list[str] = []
    line = kernels.settle_kernels(job(), HashStore(), Process(), say=said.append)
    assert said == [] and "AXONN_CACHE_DIR is empty" in line


def test_the_line_stands_above_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    line = "fused kernels: none on this GPU: it needs sm_80"
    monkeypatch.setattr(run, "settle_kernels", lambda *given, **named: line)
    train_here(tmp_path / "run")
    printed = capsys.readouterr().out
    assert printed.startswith(f"{line}\n  model  ") and printed.count("fused kernels") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("launcher", ["axonn-ext", "torchrun"])
def test_without_a_gpu_nothing_is_run_or_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
):
    monkeypatch.setenv("AXONN_CACHE_DIR", str(tmp_path / "cache"))
    start = commands.AXONN if launcher == "axonn-ext" else commands.torchrun(2)
    options = commands.small(train__verify="auto", train__device="auto")
    done = commands.run(
        [*start, "train", "--grid", "x=2", "--out", str(tmp_path / "run"), *options]
    )
    assert done.status == 0, done.output
    assert "verify" not in done.output and "fused kernels" not in done.output
    assert not (tmp_path / "cache" / "verify").exists()
