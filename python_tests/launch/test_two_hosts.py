"""Two hosts, emulated by namespaces: neither sees the name or the processes of the other."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from axonn_ext.train.watchdog.summary import summaries
from commands import AXONN, environment, processes_with, wait_until
from kills import COMMON, losses
from limits import HANG_SECONDS

ENDLESS = 1_000_000
TRAINING = (*COMMON, "--grid", "1x2x1", "--train.threads", "1")

# Needs the right to create namespaces, e.g. as root.
UNSHARE = ("unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")


def can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_unshare(), reason="cannot make namespaces here"),
]


def start_hosts(
    folder: Path, steps: int, of_host_1: Sequence[str] = (), **variables: str
) -> list[subprocess.Popen[str]]:
    """Starts a torchrun with one rank on each of two hosts; host 1 has additional options."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    hosts = []
    for number in range(2):
        train = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--nproc-per-node", "1", "--node-rank", str(number)),
            *("--master-addr", "127.0.0.1", "--master-port", str(port)),
            *("-m", "axonn_ext", "train", "--out", str(folder), *TRAINING),
            *("--train.steps", str(steps), *(of_host_1 if number else ())),
        ]
        name = ("sh", "-c", f'hostname host-{number} && exec "$@"', "sh")
        hosts.append(
            subprocess.Popen(
                [*UNSHARE, *name, *train], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, env=environment() | {"GLOO_SOCKET_IFNAME": "lo"} | variables,
            )
        )  # fmt: skip
    return hosts


@contextmanager
def two_hosts(
    folder: Path, steps: int, of_host_1: Sequence[str] = (), **variables: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Two hosts; all their processes end with the context."""
    hosts = start_hosts(folder, steps, of_host_1, **variables)
    try:
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            host.wait()


def pid_of(folder: Path, rank: int) -> int:
    """The pid of a rank in this namespace."""
    return {rank: pid for pid, rank in processes_with(str(folder)).items()}[rank]


def test_two_hosts_have_the_losses_of_one(tmp_path) -> None:
    with two_hosts(tmp_path / "two", 5) as hosts:
        for host in hosts:
            output, _ = host.communicate(timeout=HANG_SECONDS)
            assert host.returncode == 0, output
    command = [*AXONN, "train", "--out", str(tmp_path / "one"), *TRAINING, "--train.steps", "5"]
    subprocess.run(
        command, check=True, capture_output=True, timeout=HANG_SECONDS, env=environment()
    )
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert list(two) == list(one) == [1, 2, 3, 4, 5]
    # fp32 sums in different orders: gloo's between hosts, ours in shared memory.
    assert all(math.isclose(two[step], one[step], rel_tol=1e-5) for step in one)


def test_a_rank_that_is_killed_ends_both_hosts(tmp_path) -> None:
    with two_hosts(folder := tmp_path / "two", ENDLESS) as hosts:
        wait_until(lambda: len(losses(folder)) >= 3, "three steps")
        os.kill(pid_of(folder, 1), signal.SIGKILL)
        outputs = [host.communicate(timeout=HANG_SECONDS)[0] for host in hosts]
    assert all(host.returncode != 0 for host in hosts)
    assert re.search(r"\[rank 0\] error: .*(rank 1|peer|Connection)", outputs[0]), outputs[0]


def test_a_rank_that_hangs_on_the_other_host_is_named(tmp_path) -> None:
    folder = tmp_path / "two"
    with two_hosts(folder, ENDLESS, AXONN_TIMEOUT_SECONDS="20") as hosts:
        wait_until(lambda: len(losses(folder)) >= 3, "three steps")
        os.kill(pid_of(folder, 1), signal.SIGSTOP)
        wait_until(lambda: bool(summaries(folder)), "a report")
        wait_until(lambda: 0 not in processes_with(str(folder)).values(), "the end of rank 0")
        os.kill(pid_of(folder, 1), signal.SIGKILL)
        output = hosts[0].communicate(timeout=HANG_SECONDS)[0]
    line = r"rank 1 holds the job up: rank 0 has waited for it for .* of axis y \(ranks 0, 1\)"
    assert re.search(f"watchdog: {line}", output), output


def test_hosts_that_differ_are_named_on_both(tmp_path) -> None:
    with two_hosts(tmp_path / "two", ENDLESS, ("--optim.clip_norm", "2.5")) as hosts:
        outputs = [host.communicate(timeout=HANG_SECONDS)[0] for host in hosts]
    assert all(host.returncode != 0 for host in hosts)
    for rank, output in enumerate(outputs):
        said = f"[rank {rank}] error: optim.clip_norm is 2.5 on rank 1, but 1.0 on rank 0"
        assert said in output, output


def test_an_agent_that_is_killed_leaves_no_rank_on_its_host(tmp_path) -> None:
    with two_hosts(folder := tmp_path / "two", ENDLESS) as hosts:
        wait_until(lambda: len(losses(folder)) >= 3, "three steps")
        status = Path(f"/proc/{pid_of(folder, 1)}/status").read_text()
        os.kill(int(re.search(r"^PPid:\s+(\d+)$", status, re.MULTILINE)[1]), signal.SIGKILL)
        wait_until(lambda: not processes_with(str(folder)), "the end of all ranks")
        assert all(host.wait(HANG_SECONDS) != 0 for host in hosts)
