"""The examples for clusters, with substitutes for Slurm's commands and the machine's devices."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from axonn_ext.train.metrics import read_metrics
from commands import ROOT, environment, run, small, torchrun, wait_until
from limits import HANG_SECONDS

EXAMPLES = ROOT / "examples"
TORCHRUN = """#!/bin/bash
printf '%s\n' "$@"
"""

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


def example(name: str) -> Any:
    """The content of a YAML file."""
    return pytest.importorskip("yaml").safe_load((EXAMPLES / name).read_text())


def mistakes(value: Any, kind: str, models: list[Any], place: str = "") -> list[str]:
    """The keys of a Kubernetes object that its kind does not have, and values of a wrong type."""
    if re.fullmatch(r"[Dd]ict\Wstr, str\W", kind):
        return []  # also quantities, which may be numbers
    if nested := re.fullmatch(r"([Ll]ist\[|[Dd]ict\Wstr, )(\w+)\W", kind):
        if not isinstance(value, list if kind[1:].startswith("ist") else dict):
            return [f"{place}: {kind}"]
        items = enumerate(value) if isinstance(value, list) else value.items()
        return [m for key, v in items for m in mistakes(v, nested[2], models, f"{place}.{key}")]
    plain = {"str": str, "int": int, "bool": bool, "object": object}
    if kind in plain:
        return [] if isinstance(value, plain[kind]) else [f"{place}: {kind}"]
    model = next(getattr(module, kind) for module in models if hasattr(module, kind))
    types = {model.attribute_map[name]: found for name, found in model.openapi_types.items()}
    found = [f"{place}.{key}: unknown" for key in value if key not in types]
    for key, each in value.items():
        if key in types:
            found += mistakes(each, types[key], models, f"{place}.{key}")
    return found


@pytest.mark.long
def test_kubernetes_has_the_fields_of_the_jobs() -> None:
    """JobSet has no models in Python, so its jobs are checked, but not what is around them."""
    clients = [pytest.importorskip("kubernetes.client.models")]
    (job,) = example("jobset.yaml")["spec"]["replicatedJobs"]
    assert mistakes(job["template"], "V1JobTemplateSpec", clients) == []
    clients.append(pytest.importorskip("kubeflow.training.models"))
    job = example("pytorchjob.yaml")
    assert mistakes(job, "KubeflowOrgV1PyTorchJob", clients) == []
    assert set(job["spec"]["pytorchReplicaSpecs"]) == {"Master", "Worker"}
    job["spec"]["nprocPerNode"] = 8
    pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    pod["containers"][0]["comand"] = []
    found = mistakes(job, "KubeflowOrgV1PyTorchJob", clients)
    assert any("comand: unknown" in line for line in found) and ".spec.nprocPerNode: str" in found


@pytest.mark.long
def test_skypilot_accepts_its_task(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sky, task = pytest.importorskip("sky"), example("skypilot.yaml")
    found = sky.Task.from_yaml_config(task)
    assert found.num_nodes == 2
    assert [each.accelerators for each in found.resources] == [{"H100": 8}]
    with pytest.raises(Exception, match="job_recover"):
        sky.Task.from_yaml_config(task | {"resources": {"job_recover": {}}})


@pytest.mark.parametrize("name", ["jobset", "pytorchjob", "skypilot"])
def test_what_a_node_runs(tmp_path: Path, name: str) -> None:
    """The script of each node ends in torchrun with these arguments."""
    task, expected = example(f"{name}.yaml"), ["--nnodes", "2", "--nproc-per-node", "8"]
    if name == "skypilot":
        script = task["run"]
        expected += ["--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29500"]
    elif name == "jobset":
        pod = task["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        script = pod["spec"]["containers"][0]["args"][0]
        address = "axonn-node-0-0.axonn"
        expected += ["--node-rank", "1", "--master-addr", address, "--master-port", "29500"]
    else:  # by variables
        pod = task["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
        script, expected = pod["spec"]["containers"][0]["args"][0], []
    (tmp_path / "torchrun").write_text(TORCHRUN)
    (tmp_path / "torchrun").chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1",
        "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "NETWORK_ROOT": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, env=variables, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    train = "-m axonn_ext train --config /shared/my.toml --grid auto --out /shared/run"
    expected += [*train.split(), "--resume", "auto", "--checkpoint.interval", "500"]
    assert done.stdout.split() == expected, done.stderr


@pytest.mark.slow
def test_ray_train_starts_ranks(tmp_path: Path) -> None:
    """Two ranks on CPUs train as under torchrun, and resume where they were."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray[train]")
    options = ["--grid", "x=2", *small(parallel__algorithm="sequential")]
    folder, other = tmp_path / "run", tmp_path / "torchrun"
    for steps in (4, 6):
        command = [sys.executable, str(EXAMPLES / "ray_train.py"), "2", "--out", str(folder)]
        more = ["--checkpoint.interval", "2", f"--train.steps={steps}"]
        done = subprocess.run(
            [*command, *options, *more, "--optim.schedule=constant"], cwd=tmp_path, text=True,
            capture_output=True, env=environment() | {"PYTHONPATH": pythonpath()},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    done = run([*torchrun(2), "train", "--out", str(other), *options, "--optim.schedule=constant"])
    assert done.status == 0, done.output
    losses = [[step.loss for step in read_metrics(each).steps] for each in (folder, other)]
    assert losses[0] == losses[1]


def pythonpath() -> str:
    return f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
