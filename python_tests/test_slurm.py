"""Processes are configured from Slurm's variables, and meet by them."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec.settings import SettingsError, launch_environment, take_rank, worker_environment
from axonn_ext.spec.slurm import first_host
from commands import AXONN, environment, small
from kills import losses
from limits import HANG_SECONDS


def task(rank: int, size: int, per_node: str, **changes: str) -> dict[str, str]:
    """The variables of a task on the first node."""
    return {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_NTASKS": "99", "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "gpu[007-009]", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2",
    } | changes  # fmt: skip


def test_a_task_has_a_place() -> None:
    launch = launch_environment(task(3, 12, "4(x3)"))
    assert launch is not None
    assert Process.of(launch) == Process(3, 12, 4)
    assert (launch.local_rank, launch.master_addr) == (3, "gpu007")
    assert 20_000 <= launch.master_port < 30_000
    other = launch_environment(task(3, 12, "4(x3)", SLURM_STEP_ID="3"))
    assert other is not None and other.master_port != launch.master_port


@pytest.mark.parametrize(
    "variables",
    [
        {},
        task(0, 1, "1"),  # a single task starts its ranks itself
        {k: v for k, v in task(0, 8, "4(x2)").items() if k != "SLURM_STEP_NODELIST"},  # a script
        worker_environment(task(1, 8, "4(x2)")),
    ],
)
def test_what_is_no_rank(variables: Mapping[str, str]) -> None:
    assert launch_environment(variables) is None


def test_a_rank_that_takes_another_one_keeps_its_job() -> None:
    """--rank-order, for example, permutes the ranks of whole hosts."""
    variables = task(4, 8, "4(x2)", SLURM_LOCALID="0", SLURM_NODEID="1", SLURM_STEP_NUM_NODES="2")
    before = launch_environment(variables)
    assert before is not None and not before.one_host
    take_rank(0, variables)
    assert launch_environment(variables) == replace(before, rank=0)


def test_another_launcher_inside_the_step_decides() -> None:
    by_torchrun = {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", "GROUP_WORLD_SIZE": "2",
    }  # fmt: skip
    inside = task(1, 2, "1(x2)")
    assert launch_environment(inside | by_torchrun) == launch_environment(by_torchrun)


@pytest.mark.parametrize("variables", [{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}])
def test_what_the_user_has_set_holds(variables: dict[str, str]) -> None:
    launch = launch_environment(task(1, 4, "4") | variables)
    assert launch is not None
    assert (launch.master_addr, launch.master_port) == ("10.0.0.1", 4000)


@pytest.mark.parametrize(
    "variables",
    [
        task(1, 4, "2(x2)", SLURM_LOCALID="0", SLURM_NODEID="1"),  # --distribution=cyclic
        task(0, 7, "4,3"),
        task(4, 7, "4,3", SLURM_LOCALID="0", SLURM_NODEID="1"),
        {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"},  # without LOCAL_WORLD_SIZE
    ],
)
def test_ranks_that_are_not_in_a_row(variables: dict[str, str]) -> None:
    launch = launch_environment(variables)
    assert launch is not None
    with pytest.raises(SettingsError, match=f"in a row; rank {launch.rank} of .*--distribution"):
        Process.of(launch)


@pytest.mark.parametrize(
    ("name", "value"),
    [("SLURM_STEP_TASKS_PER_NODE", "four"), ("SLURM_JOB_ID", "-1"), ("SLURM_NODEID", "x")],
)
def test_variables_that_cannot_be_read(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=rf"{name} must .*, as Slurm sets it, got '{value}'"):
        launch_environment(task(0, 4, "4", **{name: value}))


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu1", "gpu1"), ("gpu1,gpu2", "gpu1"), ("gpu[007-010,12],login1", "gpu007"),
        ("gpu[12,3]-ib", "gpu12-ib"), ("rack[1-2]n[3-4],x", "rack1n3"),
    ],
)  # fmt: skip
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.long
def test_processes_started_by_slurm_train(tmp_path: Path) -> None:
    job = str(random.SystemRandom().randrange(10**6))
    command = [*AXONN, "train", "--out", str(tmp_path), "--grid", "x=2", *small()]
    ranks = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment()
            | task(rank, 2, "2", SLURM_JOB_ID=job, SLURM_STEP_NODELIST="localhost"),
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        output, _ = rank.communicate(timeout=HANG_SECONDS)
        assert rank.returncode == 0, output
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
