"""The examples for clusters, with substitutes for Slurm's commands and the machine's devices."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from commands import ROOT, wait_until
from limits import HANG_SECONDS

SRUN = """#!/bin/bash
case " $* " in *" --overlap "*)  # is the node healthy?
  node=$(grep -o "nodelist=[^ ]*" <<<"$*"); [ ! -e "$STATE/broken-${node#*=}" ]; exit
esac
echo "$@" >> "$STATE/starts"
if [ ! -e "$STATE/broken-gpu2" ]; then touch "$STATE/broken-gpu2"; exit 137; fi
trap 'trap "exit 0" USR1' USR1  # the first signal finds ranks that are still starting
touch "$STATE/runs"
while true; do sleep 0.05; done
"""
SCONTROL = """#!/bin/bash
case "$1" in show) printf '%s\\n' gpu1 gpu10 gpu2 ;; *) echo "$@" > "$STATE/scontrol" ;; esac
"""


@pytest.mark.long
def test_a_slurm_job_starts_again_on_a_spare_node_and_is_queued_again(tmp_path: Path) -> None:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "STATE": str(tmp_path), "TRAIN_NODES": "2",
        "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "gpu[1-2,10]", "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS_PER_NODE": "4",
    }  # fmt: skip
    job = subprocess.Popen(
        ["bash", "examples/slurm.sbatch", "runs/big", "--grid", "auto"], cwd=ROOT,
        env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_until(lambda: (tmp_path / "runs").exists() or job.poll() is not None, "a second start")
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=HANG_SECONDS)
    assert job.returncode == 0, output
    starts = (tmp_path / "starts").read_text()
    assert starts.count("--ntasks=8 --ntasks-per-node=4 ") == 2
    assert starts.count("--nodelist=gpu1,gpu2 ") == starts.count("--nodelist=gpu1,gpu10 ") == 1
    assert "--out runs/big --resume auto --checkpoint.interval 500 --grid auto" in starts
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"


@pytest.mark.parametrize(
    ("devices", "set_before", "expected"),
    [
        ((), {}, {}),
        (("infiniband/mlx5_0", "net/ib0"), {}, {"NCCL_SOCKET_IFNAME": "ib0"}),
        (("infiniband/mlx5_0", "net/eth0"), {}, {"NCCL_SOCKET_IFNAME": ""}),
        (("cxi/cxi0", "net/hsn1"), {}, {"GLOO_SOCKET_IFNAME": "hsn1", "FI_PROVIDER": "cxi"}),
        (("cxi/cxi0",), {"FI_PROVIDER": "tcp"}, {"FI_PROVIDER": "tcp"}),
    ],
)  # fmt: skip
def test_network_settings(
    tmp_path: Path, devices: tuple[str, ...], set_before: dict[str, str], expected: dict[str, str]
) -> None:
    for device in devices:
        (tmp_path / "sys" / "class" / device).mkdir(parents=True)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", ". examples/network.sh; env", "bash", "--out"],
        cwd=ROOT, capture_output=True, text=True, check=True,
        env={"PATH": os.environ["PATH"], "NETWORK_ROOT": str(tmp_path)} | set_before,
    )  # fmt: skip
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert {name: found.get(name, "") for name in expected} == expected
    assert bool(devices) == any(name.startswith(("NCCL_", "GLOO_", "FI_")) for name in found)
