"""A user's mistakes and a lost process: the messages, and no leftovers."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from pathlib import Path

import pytest

from commands import (
    AXONN,
    processes_with,
    run,
    running,
    shared_segments,
    small,
    start,
    torchrun,
    wait_until,
)
from limits import HANG_SECONDS

pytestmark = pytest.mark.long

USER_ERROR = 2


def assert_refused(arguments: list[str], *expected: str) -> None:
    """Checks that the command names the mistake, without a traceback and with status 2."""
    done = run([*AXONN, *arguments])
    assert done.status == USER_ERROR, done.output
    assert all(line.startswith(("error: ", "  ")) for line in done.output.splitlines())
    for part in expected:
        assert part in done.output


def test_grid_is_not_the_world() -> None:
    assert_refused(
        ["train", "--nproc", "3", "--grid", "x=2,y=2", *small()],
        "grid x=2,y=2,z=1,data=1,pipe=1 needs 4 processes", "but got 3",
    )  # fmt: skip


def test_dimension_that_an_axis_does_not_divide() -> None:
    assert_refused(
        ["train", "--grid", "x=3", *small(model__sequence_length=30)],
        "num_heads: 4 must be divisible by 3 (x=3)", "intermediate_size: 128",
    )  # fmt: skip


def test_batch_too_small_for_data_z_and_y() -> None:
    assert_refused(
        ["train", "--grid", "y=2,z=2,data=2", *small(train__batch_size=4)],
        "sequences of a micro-batch: 4 must be divisible by 8 (data=2 * z=2 * y=2)",
    )


def test_unknown_key() -> None:
    assert_refused(
        ["train", *small(), "--model.hiden_size", "64"],
        "unknown key model.hiden_size", "did you mean model.hidden_size?",
    )  # fmt: skip


def test_missing_files(tmp_path: Path) -> None:
    assert_refused(
        ["train", "--config", str(tmp_path / "none.toml")],
        "--config: ",
        "none.toml: cannot be read: No such file",
    )
    assert_refused(
        ["train", *small(data__text=tmp_path / "none.txt")], "data.text", "none.txt does not exist"
    )


def test_empty_text(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert_refused(
        ["train", "--nproc", "2", "--grid", "x=2", *small(data__text=tmp_path / "empty")],
        "data.text", "empty is empty",
    )  # fmt: skip


def test_pipelines_where_there_are_none() -> None:
    for command in (["bench", "linear"], ["tune", "--model", "gpt2-small"]):
        assert_refused([*command, "--grid", "pipe=2"], "pipe=2", "pipeline stages")


def test_unknown_command_and_option() -> None:
    assert_refused(["trian"], "unknown command trian (did you mean train?)")
    for command in ("train", "doctor"):
        assert_refused([command, "--outt=a"], "unknown argument --outt=a", f"{command} --help")
    assert_refused(["train", "--gird", "x=2"], "unknown argument --gird (did you mean --grid?)")
    assert_refused(["doctor", "--jsno=a"], "unknown argument --jsno=a (did you mean --json?)")
    assert_refused(["checkpoint", "list", "a", "--jsno"], "--jsno", "checkpoint list --help")
    assert_refused(["train", "--lr=1"], "--lr=1 (did you mean --optim.lr?)")
    assert_refused(["finetune", "--model", "a", "--data", "b", "--batch_size=1"], "--batch-size?)")
    assert_refused(["plan", "--hidden_size=1"], "unknown argument --hidden_size=1 (see")
    assert_refused(["train", "--train.lr=1"], "unknown key train.lr", "did you mean optim.lr?")


@pytest.mark.parametrize(
    ("files", "folder", "remedy"),
    [
        ([], "meta-llama/Llama-3.2-1B", "hf download meta-llama/Llama-3.2-1B"),
        (["run/metrics.jsonl"], "run", "axonn-ext checkpoint export"),
        (["run/metrics.jsonl", "run/model/config.json"], "run", "; the model is in "),
        (["tuned/adapter_config.json"], "tuned", "--model MODEL --adapter FOLDER"),
        ([], "nowhere", "nowhere: expected a folder with config.json"),
    ],
)
def test_a_folder_without_a_model(
    tmp_path: Path, files: list[str], folder: str, remedy: str
) -> None:
    folder = str(tmp_path / folder) if files else folder
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert_refused(["generate", "--model", folder, "--prompt", "a"], remedy)
    assert_refused(["finetune", "--model", folder, "--data", "a.jsonl"], remedy)


def test_folder_that_holds_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    assert_refused(
        ["train", "--grid", "x=2", "--out", str(tmp_path), *small()],
        f"--out {tmp_path}", "--overwrite",
    )  # fmt: skip


STRAGGLER = """
import os, sys, time
time.sleep(float(os.environ["RANK"]))
sys.path.insert(0, os.getcwd())  # as `python -m` does
if os.environ["RANK"] == "2":
    sys.argv += ["--train.steps", "many"]
from axonn_ext.cli import main
sys.exit(main())
"""


def test_under_torchrun_every_mistake_is_shown_once(tmp_path: Path) -> None:
    """Ranks start a second apart, and all come to speak; ranks 0 and 1 make the same mistake."""
    script = tmp_path / "straggler.py"
    script.write_text(STRAGGLER)
    arguments = ["train", "--grid", "x=2,y=2", "--out", str(tmp_path / "run"), *small()]
    done = run([*torchrun(3)[:-2], str(script), *arguments])
    assert done.status == 1  # torchrun turns every failure into 1
    of_two = "error: grid x=2,y=2,z=1,data=1,pipe=1 needs 4 processes"
    assert f"[rank 0] {of_two}" in done.output and done.output.count(of_two) == 1
    assert done.output.count("[rank 2] error: train.steps") == 1
    assert "exitcode  : 2" in done.output
    assert "[rank 0] Traceback" not in done.output  # torchrun shows its own
    assert not (tmp_path / "run").exists()


def test_mistake_of_one_rank_ends_all(tmp_path: Path) -> None:
    """Only rank 0 looks at the folder of the run; the others must not wait for it."""
    (tmp_path / "thesis.tex").touch()
    done = run([*torchrun(2), "train", "--grid", "x=2", "--out", str(tmp_path), *small()])
    assert done.status == 1
    assert f"[rank 0] error: --out {tmp_path}" in done.output
    assert "[rank 1] error: stopping, because of the mistake that rank 0 reports" in done.output


@pytest.mark.parametrize(
    "launcher", ["axonn-ext", pytest.param("torchrun", marks=pytest.mark.slow)]
)
def test_killed_rank_ends_the_job(launcher: str, tmp_path: Path) -> None:
    folder, output = tmp_path / "run", tmp_path / "output"
    command = [*(AXONN if launcher == "axonn-ext" else torchrun(4)), "train"]
    job = start(
        [*command, "--grid", "x=2,y=2", "--out", str(folder), *small(train__steps=100_000)],
        output=output,
    )
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 2000, "the first steps")
    workers = processes_with(str(folder))
    assert sorted(workers.values()) == [0, 1, 2, 3]
    segments = shared_segments(workers)
    assert segments, "the job uses symmetric memory"
    victim = next(pid for pid, rank in workers.items() if rank == 2)
    os.kill(victim, signal.SIGKILL)
    status = job.wait(timeout=HANG_SECONDS)
    printed = output.read_text()
    assert status == 1, printed
    if launcher == "axonn-ext":
        assert f"error: rank 2 (pid {victim}) was killed by SIGKILL" in printed
        assert "Traceback" not in printed
    else:
        assert f"Signal 9 (SIGKILL) received by PID {victim}" in printed
        assert re.search(r"rank\s*: 2 ", printed)
    wait_until(lambda: not processes_with(str(folder)), "the end of all processes")
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert not segments & shared_segments(running())


def test_ended_launcher_takes_its_processes_along(tmp_path: Path) -> None:
    folder, output = tmp_path / "run", tmp_path / "output"
    command = [*AXONN, "train", "--grid", "x=2", "--out", str(folder)]
    job = start([*command, *small(train__steps=100_000)], output=output)
    wait_until(lambda: (folder / "metrics.jsonl").exists(), "the run to begin")
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=HANG_SECONDS) == 1
    assert "error: the job was ended by SIGTERM" in output.read_text()
    wait_until(lambda: not processes_with(str(folder)), "the end of all processes")


@pytest.mark.parametrize("limit", [4, 8])
def test_a_limit_on_processes_is_named(limit: int) -> None:
    """It fails at the start of ranks or in numpy. With higher limits, threads of torch fail, some
    with SIGABRT.
    """
    with tempfile.TemporaryDirectory() as folder:  # accessible to other users
        job = [*AXONN, "train", "--grid", "x=2", "--out", f"{folder}/run", *small()]
        limited = ["bash", "-c", f'ulimit -u {limit}; exec "$@"', "bash", *job]
        if os.getuid() == 0:
            os.chown(folder, _NOBODY, _NOBODY)
            limited = [*_AS_NOBODY, *limited]
        done = run(limited)
    if done.status:  # the number of threads that libraries start depends on the machine
        assert "Traceback" not in done.output
        assert f"cannot start another process or thread (ulimit -u is {limit}, " in done.output


# The limit does not apply to root. The other user may read root's files, such as its Python.
_RIGHT = "dac_override"
_NOBODY = 65534
_AS_NOBODY = (
    *("setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"),
    *(f"--inh-caps=-all,+{_RIGHT}", f"--ambient-caps=+{_RIGHT}", f"--bounding-set=-all,+{_RIGHT}"),
)
