"""Jobs that torchrun restarts with the remaining ranks, from the last checkpoint."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from axonn_ext.checkpoint.folder import CheckpointFolder
from commands import environment, wait_until
from kills import COMMON, losses
from limits import HANG_SECONDS

STEPS, INTERVAL = 60, 5


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("localhost", port)) == 0


class Host:
    """A torchrun with its ranks, which acts as a separate host."""

    def __init__(self, folder: Path, *, hosts: str, ranks: int, port: int, number: int) -> None:
        self.output = folder.with_name(f"host-{number}.log")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", hosts),
            *("--nproc-per-node", str(ranks), "--max-restarts", "10", "--rdzv-id", "elastic"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"),
            *("--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1", "-m", "axonn_ext"),
            *("train", "--out", str(folder), *COMMON, "--train.steps", str(STEPS)),
            *("--train.threads", "1", "--grid", "auto", "--resume", "auto"),
            *("--checkpoint.interval", str(INTERVAL), "--checkpoint.keep_last", "100"),
        ]
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, env=environment(),
                start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """Kills torchrun and its ranks at once, like a power failure of the host."""
        for pid in (*self.ranks(), self.process.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    def text(self) -> str:
        return self.output.read_text(errors="replace")


def check(hosts: list[Host], folder: Path, kill) -> str:
    """Waits for checkpoints, calls `kill`, and waits for the end; returns the output after that."""
    checkpoints = CheckpointFolder(folder / "checkpoints")
    try:
        wait_until(lambda: len(checkpoints.steps()) >= 2, "two checkpoints")
        kill()
        left = [host for host in hosts if host.process.poll() is None]
        for host in left:
            assert host.process.wait(timeout=HANG_SECONDS) == 0, host.text()
    finally:
        for host in hosts:
            if host.process.poll() is None:
                host.kill()
    return "".join(host.text() for host in left)


@pytest.mark.slow
def test_a_restart_on_as_many_ranks_goes_on(tmp_path) -> None:
    folder = tmp_path / "run"
    host = Host(folder, hosts="1", ranks=2, port=free_port(), number=0)
    text = check([host], folder, lambda: os.kill(host.ranks()[1], signal.SIGKILL))
    assert len(re.findall(r"resumed  step \d+ of a run on ", text)) == 1
    assert list(losses(folder)) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_eight_ranks_go_on_as_four(tmp_path) -> None:
    folder, port = tmp_path / "run", free_port()
    hosts = [Host(folder, hosts="2:4", ranks=2, port=port, number=0)]
    # The first torchrun that listens hosts the rendezvous, so it must be one that is not killed.
    wait_until(lambda: listens(port), "the rendezvous")
    hosts += [Host(folder, hosts="2:4", ranks=2, port=port, number=i) for i in range(1, 4)]
    text = check(hosts, folder, lambda: [host.kill() for host in hosts[2:]])
    found = re.findall(r"resumed  step (\d+) of a run on (\S+), from", text)
    assert found, text
    assert "8 processes" in text and "4 processes" in text
    assert list(losses(folder)) == list(range(1, STEPS + 1))
