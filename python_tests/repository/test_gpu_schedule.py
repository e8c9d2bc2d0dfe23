"""How `make gpu-check` runs stages: one that fails, hangs or crashes does not affect others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import wait_until
from loading import load_all

modules = load_all("tools/gpu_check.py")
gpu_found, gpu_runs = modules["gpu_found"], modules["gpu_runs"]
gpu_schedule, gpu_stages = modules["gpu_schedule"], modules["gpu_stages"]

LONG = 600.0  # seconds, more than any stage needs
HANGS = "sleep 1000"


def stage(folder: Path, name: str, script: str, *, seconds: float = LONG, kind: str = "bench"):
    """A stage that runs a shell script."""
    return gpu_stages.Stage(
        name, kind, seconds, ("sh", "-c", script), folder / f"{name}.json", ample_seconds=seconds
    )


@pytest.fixture
def check(tmp_path: Path):
    return gpu_schedule.Check(tmp_path, tmp_path / "cache")


def wait_for(path: Path) -> str:
    """Waits for a file that another process writes; returns its content."""
    while not path.exists() or not path.read_text().endswith("\n"):
        time.sleep(0.01)
    return path.read_text().strip()


def is_alive(pid: str) -> bool:
    """Whether a process is running; an ended one may remain as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_each_stage_costs_itself_alone(check, tmp_path: Path):
    for name, script, seconds in (
        ("fails", "echo the reason; exit 3", LONG),
        ("crashes", "kill -SEGV $$", LONG),
        ("hangs", f"echo begun; {HANGS}", gpu_runs.GRACE_SECONDS),
        ("passes", "echo 42 us", LONG),
    ):
        check.run_row((stage(tmp_path, name, script, seconds=seconds),))
    absent = gpu_stages.Stage("absent", "bench", 1, ("no-such-program",), tmp_path / "absent.json")
    check.run_row((absent,))
    found = {name: (each.status, each.found) for name, each in check.outcomes.items()}
    assert found["fails"] == ("failed", "ended with status 3: the reason")
    assert found["crashes"] == ("failed", "was killed by SIGSEGV: ")
    assert found["hangs"][0] == "time was up"
    assert found["passes"] == ("ok", "42 us")
    assert found["absent"][0] == "failed" and "could not be started" in found["absent"][1]
    assert not check.right, "something has failed"
    written = json.loads((tmp_path / "summary.json").read_text())["stages"]
    assert {name: (each["status"], each["found"]) for name, each in written.items()} == found


def test_sigterm_that_is_ignored(tmp_path: Path):
    log = tmp_path / "log"
    script = f"trap '' TERM; echo > {tmp_path / 'ready'}; while :; do sleep 0.1; done"
    run = gpu_runs.Run(("sh", "-c", script), LONG, log, os.environ)
    wait_for(tmp_path / "ready")
    assert not run.has_ended()
    run.ask_to_end()
    while not run.has_ended():
        time.sleep(0.01)
    assert run.time_was_up and run.status == -signal.SIGKILL


@pytest.mark.parametrize("ending", ["exit 0", "exit 3", "kill -KILL $$", HANGS])
def test_nothing_outlives_a_stage(tmp_path: Path, ending: str):
    """Neither a child without our variables, nor an orphan in its own session, survives."""
    pids = [tmp_path / "child", tmp_path / "other"]
    script = f"""
        env -i sleep 1000 & echo $! > {pids[0]}
        setsid sh -c 'sleep 1000 & echo $! > {pids[1]}' &
        while ! [ -s {pids[1]} ]; do sleep 0.01; done
        {ending}
    """
    run = gpu_runs.Run(("sh", "-c", script), LONG, tmp_path / "log", os.environ)
    found = [wait_for(pid) for pid in pids]
    if ending == HANGS:
        run.ask_to_end()
    while not run.has_ended():
        time.sleep(0.01)
    wait_until(lambda: not any(map(is_alive, found)), "the end of what was killed")


def test_what_has_no_time_left_is_told_at_once(check, tmp_path: Path):
    check.deadline = time.monotonic() + gpu_schedule.LEAST_SECONDS
    marker = tmp_path / "started"
    row = (stage(tmp_path, "a", f"touch {marker}"), stage(tmp_path, "b", HANGS))
    check.run_row(row)
    assert {each.status for each in check.outcomes.values()} == {"no time left"}
    assert not marker.exists() and not check.right, "nothing has passed"


def test_a_stage_has_its_share_and_no_more_than_is_left(check, tmp_path: Path):
    long = stage(tmp_path, "a", "true", seconds=100)
    assert check.seconds_of(long) == 100, "ample time"
    check.scale = 0.5
    assert check.seconds_of(long) == 50
    check.scale = 0.01
    assert check.seconds_of(long) == gpu_schedule.LEAST_SECONDS
    check.deadline = time.monotonic() + 30
    check.scale = 2.0
    assert check.seconds_of(long) < 30 - 1


def test_stages_of_a_row_run_at_the_same_time(check, tmp_path: Path):
    """Each stage waits for the other."""
    a, b = tmp_path / "a", tmp_path / "b"
    wait = "touch {}; while ! [ -e {} ]; do sleep 0.01; done"
    check.run_row((
        stage(tmp_path, "first", wait.format(a, b)), stage(tmp_path, "second", wait.format(b, a)),
    ))  # fmt: skip
    assert [each.status for each in check.outcomes.values()] == ["ok", "ok"]
    assert check.right


PROGRAM = """
import signal, sys
from pathlib import Path
import gpu_check, gpu_schedule, gpu_stages
signal.signal(signal.SIGTERM, gpu_check._exit)
folder = Path(sys.argv[1])
command = ("sh", "-c", f"echo $$ > {folder}/pid; sleep 1000")
check = gpu_schedule.Check(folder, folder)
check.run_row((gpu_stages.Stage("sleeps", "bench", 600, command, folder / "rows.json"),))
"""


def test_the_stages_end_with_the_check(tmp_path: Path):
    tools = Path(gpu_runs.__file__).parent
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=tools)
    pid = wait_for(tmp_path / "pid")
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    wait_until(lambda: not is_alive(pid), "the end of the stage")
    stages = json.loads((tmp_path / "summary.json").read_text())["stages"]
    assert stages["sleeps"]["status"] == "time was up"


def test_commands_have_a_cache_of_this_run_and_tests_have_none(check, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("AXONN_CACHE_DIR", "/somewhere/else")
    for kind in ("bench", "test"):
        check.run_row((stage(tmp_path, kind, "echo cache: $AXONN_CACHE_DIR", kind=kind),))
    assert gpu_found.last_line(tmp_path / "bench.log") == f"cache: {tmp_path / 'cache'}"
    assert gpu_found.last_line(tmp_path / "test.log") == "cache:"


def test_the_time_after_which_a_test_hangs_follows_from_the_stage(check, tmp_path: Path):
    told = gpu_stages.Stage("told", "bench", LONG, ("echo", gpu_stages.HANG), tmp_path / "x",
                            ample_seconds=LONG)  # fmt: skip
    check.run_row((told,))
    assert check.outcomes["told"].found == f"{LONG / 2:.0f}"


def test_long_output_keeps_its_ends(check, tmp_path: Path):
    script = "echo begin; yes | head -c 3000000; echo end"
    check.run_row((stage(tmp_path, "talks", script),))
    text = (tmp_path / "talks.log").read_text()
    assert len(text) < gpu_runs.MAX_LOG_BYTES + 100
    assert text.splitlines()[1] == "begin" and text.endswith("end\n") and "[...]" in text


# --- What was found -------------------------------------------------------------------------------


def rows_stage(folder: Path, content: object, *, status: int = 0, ending: str = ""):
    (folder / "found.json").write_text(json.dumps(content))
    script = f"echo the last line; {ending or f'exit {status}'}"
    seconds = gpu_runs.GRACE_SECONDS + 0.5 if ending else LONG
    return stage(folder, "found", script, seconds=seconds)


@pytest.mark.parametrize(
    ("content", "status", "expected", "found"),
    [
        ({"rows": [{"correct": True}] * 2}, 0, "ok", "2 rows: the last line"),
        ([{"us": 1.0}], 0, "ok", "1 rows: the last line"),
        ({"rows": [{"correct": False}, {"correct": True}]}, 1, "failed",
         "2 rows: 1 WRONG: the last line"),
        ({"rows": [{"problem": ""}, {"problem": "differs"}]}, 1, "failed",
         "2 rows: 1 WRONG: the last line"),
        ({"findings": []}, 0, "ok", "the last line"),
        ({"findings": [{"name": "cuda:0", "status": "problem"}] + [{"name": "torch",
          "status": "ok"}] * 3}, 1, "failed", "1 problem, 3 ok, problem: cuda:0: the last line"),
        ({"groups": [{"group": {"name": "fused: sums"}, "status": "failed"},
                     {"group": {"name": "fused: ops"}, "status": "passed"}]}, 1, "failed",
         "1 failed, 1 passed, failed: fused: sums: the last line"),
        ({"groups": [{"group": {"name": "triton"}, "status": "not run"}]}, 0, "not run",
         "1 not run"),
        ("no rows", 0, "ok", "the last line"),
    ],
)  # fmt: skip
def test_rows_are_counted(check, tmp_path: Path, content, status, expected, found):
    check.run_row((rows_stage(tmp_path, content, status=status),))
    assert (check.outcomes["found"].status, check.outcomes["found"].found) == (expected, found)


def test_a_wrong_row_fails_a_stage_that_is_cut(check, tmp_path: Path):
    for wrong in ({"correct": False}, {"problem": "differs"}):
        check.run_row((rows_stage(tmp_path, {"rows": [wrong]}, ending=HANGS),))
        assert check.outcomes["found"].status == "failed"
    check.run_row((rows_stage(tmp_path, {"rows": [{"correct": True}]}, ending=HANGS),))
    assert check.outcomes["found"].status == "time was up"
    assert check.outcomes["found"].found.startswith("1 rows")


def steps(*losses: float) -> list[dict[str, float]]:
    return [{"loss": loss, "tokens_per_s": 1e6 * loss, "tflops": 100 * loss,
             "memory_bytes": 1 << 30} for loss in losses]  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "status", "found"),
    [
        ((4.0, 3.0, 2.0, 1.0), "ok", "loss 4.000 -> 1.000 in 4 steps, 1,500,000 tokens/s, 150.0"),
        ((1.0, 2.0), "failed", "loss 1.000 -> 2.000"),
        ((), "not run", "no step has ended: trained"),
    ],
)
def test_a_training_must_learn(check, tmp_path: Path, losses, status: str, found: str):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(step) + "\n" for step in steps(*losses)))
    trains = gpu_stages.Stage("train-it", "train", LONG, ("echo", "trained"), metrics)
    check.run_row((trains,))
    assert check.outcomes["train-it"].status == status
    assert check.outcomes["train-it"].found.startswith(found)
    assert (tmp_path / "train-it.jsonl").read_text() == metrics.read_text()


def test_rows_of_another_form_fail(check, tmp_path: Path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"loss": 1.0}\n')
    check.run_row((gpu_stages.Stage("train-it", "train", LONG, ("true",), metrics),))
    assert check.outcomes["train-it"].status == "failed"
    assert "metrics.jsonl cannot be read" in check.outcomes["train-it"].found


def test_an_earlier_run_on_the_same_machine_is_kept(check, tmp_path: Path):
    check.machine = {"gpu": "H100", "torch": "2.14", "extension": "not built"}
    check.run_row((stage(tmp_path, "old", "echo 1"), stage(tmp_path, "both", "echo 1")))
    read: Callable = gpu_schedule.read_earlier
    path = tmp_path / "summary.json"
    assert read(path, check.machine | {"torch": "2.13"}) == {}
    assert read(tmp_path / "absent.json", check.machine) == {}
    again = gpu_schedule.Check(
        tmp_path, tmp_path, earlier=read(path, check.machine | {"extension": ""})
    )
    again.run_row((stage(tmp_path, "both", "echo 2"),))
    stages = json.loads(path.read_text())["stages"]
    assert {name: each["found"] for name, each in stages.items()} == {"old": "1", "both": "2"}
