"""A job on one host opens only sockets on loopback and files of its user."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed import HashStore

from axonn_ext.ranks.launch.bell import Bell
from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.stores import file_name
from axonn_ext.spec import settings
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.run_folder import folder_of_rank_0
from axonn_ext.train.watchdog.watchdog import Times, Watchdog
from commands import AXONN, environment, processes_with, small, torchrun, wait_until
from kills import losses
from limits import HANG_SECONDS
from listeners import family, listeners

NOBODY = 65534
TRIES = ('cat "$0"', 'echo x >> "$0"', 'ls "${0%/*}"', 'touch "${0%/*}/new"')


def on_loopback(address: str) -> bool:
    host, _, _ = address.rpartition(":")
    return ipaddress.ip_address(host).is_loopback


def as_nobody(attempt: str, store: str) -> str:
    done = subprocess.run(
        ["sh", "-c", attempt, store], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/",
        capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    return done.stderr


def look_at_job(
    command: Sequence[str], folder: Path
) -> tuple[int, dict[int, set[str]], list[Path]]:
    """The pid of a training job, the listeners of its processes, and the files of its store."""
    temporary = Path(tempfile.mkdtemp())
    temporary.chmod(0o755)  # so its content must protect itself
    options = small(train__steps=1_000_000, train__eval_interval=0)
    job = subprocess.Popen(
        [*command, "train", "--out", str(folder), "--grid", "x=2", *options],
        env=environment() | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: len(losses(folder)) > 0 or job.poll() is not None, "a step")
        assert job.poll() is None, job.communicate()[0]
        found, ranks = listeners(family(job.pid)), processes_with(str(folder))
        assert ranks.keys() <= found.keys(), "gloo has listeners"
        stores = list(temporary.glob("axonn_ext_*/store"))
        for store in stores:
            assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
            refused = [as_nobody(attempt, str(store)) for attempt in TRIES if os.getuid() == 0]
            assert all("Permission denied" in answer for answer in refused), refused
    finally:
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=HANG_SECONDS)
        shutil.rmtree(temporary)
    return job.pid, found, stores


@pytest.mark.long
def test_a_job_of_ours_listens_on_loopback_alone(tmp_path: Path) -> None:
    launcher, found, stores = look_at_job(AXONN, tmp_path / "run")
    assert launcher not in found, "its ranks meet in a file"
    assert len(stores) == 1 and not stores[0].parent.exists(), "it is gone"
    addresses = set().union(*found.values())
    assert all(map(on_loopback, addresses)), found


@pytest.mark.long
def test_ranks_of_torchrun_on_one_host_listen_on_loopback_alone(tmp_path: Path) -> None:
    launcher, found, _ = look_at_job(torchrun(2), tmp_path / "run")
    del found[launcher]  # torchrun's own store
    assert found and all(map(on_loopback, set().union(*found.values()))), found


@pytest.mark.parametrize(
    ("environment", "interface", "lazy"),
    [
        ({}, "lo", "1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}, "lo", "1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}, None, "1"),
        # another launcher, which may have several hosts
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCH_GLOO_LAZY_INIT": "0"}, None, "0"),
        ({"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth7"}, "eth7", "1"),
    ],
)
def test_the_connections_of_a_job(
    environment: dict[str, str], interface: str | None, lazy: str
) -> None:
    settings.prepare_connections(environment)
    for library in ("GLOO", "NCCL"):
        assert environment.get(f"{library}_SOCKET_IFNAME") == interface
    assert environment["TORCH_GLOO_LAZY_INIT"] == lazy


# --- What the store says is not believed ----------------------------------------------------------


@pytest.mark.parametrize("name", ["../elsewhere", "/tmp/elsewhere", "..", "", "a\0b", 7])
def test_a_name_of_the_store_is_no_path(name: object) -> None:
    with pytest.raises(ValueError, match="must have the name of a file"):
        file_name(name)


def test_a_watchdog_writes_nowhere_else(tmp_path: Path) -> None:
    said: list[str] = []
    store, run = HashStore(), tmp_path / "run"
    question = f'{{"name": "{tmp_path}/elsewhere", "rank": 1, "why": "", "stuck": true}}'
    store.set("bell/0", json.dumps(["report", question]))
    times, here = Times(HANG_SECONDS, HANG_SECONDS), Process(0, 2, 2)
    bell = Bell(store, here)
    dog = Watchdog(bell, here, run, times=times, say=said.append)
    with bell, dog:
        wait_until(lambda: bool(said), "a line about the name")
    assert "must have the name of a file" in said[0]
    assert not list(tmp_path.iterdir())


def test_ranks_follow_rank_0_to_its_folder_only_beside_theirs(tmp_path: Path) -> None:
    store, here = HashStore(), Process(1, 2, 2)
    store.set("settled/folder", '"runs/run-2"')
    assert folder_of_rank_0(store, here, Path("runs/run-1")) == Path("runs/run-2")
    with pytest.raises(UserError, match="give all ranks the same folder"):
        folder_of_rank_0(store, here, tmp_path / "run-1")
