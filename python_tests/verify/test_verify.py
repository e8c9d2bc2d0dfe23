"""`axonn-ext verify` without a GPU: fake groups, in separate processes."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import commands
from axonn_ext.cli import main
from axonn_ext.cli import verify as command
from axonn_ext.kernels import verified
from axonn_ext.kernels.verified import Stamp, Verdict
from axonn_ext.spec.settings import worker_environment
from axonn_ext.terminal.errors import UserError
from axonn_ext.verify import groups, run, virtual
from axonn_ext.verify.groups import Group
from axonn_ext.verify.run import FAILED, NOT_RUN, PASSED, Outcome
from axonn_ext.verify.worker import NOT_RUN_STATUS, Task
from limits import HANG_SECONDS
from stamp_cases import H100, WRONG

pytestmark = pytest.mark.long

# --- Groups of cases, in processes of their own ---------------------------------------------------


def group(target: str, kernel: str = "fused", num_ranks: int = 1, gpus: int = 1) -> Group:
    return Group(target, kernel, f"verify_targets:{target}", num_ranks, gpus)


# Runs groups as the command does, and prints its stack if it does not end.
HANG = f"""
import faulthandler, sys
faulthandler.dump_traceback_later({HANG_SECONDS / 2}, exit=True)
from axonn_ext.terminal.errors import TrainingError
from axonn_ext.verify import run
from axonn_ext.verify.groups import Group
try:
    list(run.run_groups([Group("hangs", "fused", "verify_targets:hangs")], device="cpu"))
except TrainingError as error:
    sys.exit(7 if str(error) == "ended by SIGTERM" else 8)
"""
POPEN = subprocess.Popen


def is_running(process: Path) -> bool:
    """Whether the process of a folder in /proc runs; a zombie, which we may not reap, does not."""
    try:
        return "State:\tZ" not in (process / "status").read_text()
    except OSError:
        return False


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets processes find verify_targets.py."""
    path = [str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("RANK", "3")  # a leftover variable
    monkeypatch.setattr(run, "GRACE_SECONDS", 0.5)


@pytest.mark.parametrize(
    ("target", "num_ranks", "status", "reason"),
    [
        ("passes", 2, PASSED, ""),
        ("fails", 1, FAILED, "one of two is wrong"),
        ("cannot_run", 1, NOT_RUN, "it is of sm_80"),
        ("raises", 1, FAILED, "rank 0 ended with status 1: RuntimeError: CUDA error: unspecified"),
        ("rank_1_is_killed", 2, FAILED, "rank 1 was killed by SIGABRT"),
        ("runs_out_of_memory", 2, NOT_RUN, "CUDA out of memory. Tried to allocate 2 GiB"),
        ("is_wrong_beside_one_out_of_memory", 2, FAILED, "wrong"),
        ("lacks_python_h", 1, NOT_RUN, "Command '['false']' returned non-zero exit status 1"),
    ],
)
def test_a_group(targets: None, target: str, num_ranks: int, status: str, reason: str):
    outcome = run.run_group(group(target, num_ranks=num_ranks), seconds=HANG_SECONDS, device="cpu")
    assert (outcome.status, outcome.reason[: len(reason)]) == (status, reason), outcome


def test_without_a_c_compiler_triton_is_not_run(targets: None):
    pytest.importorskip("triton")
    outcome = run.run_group(
        group("finds_no_compiler", "triton"), seconds=HANG_SECONDS, device="cpu"
    )
    assert (outcome.status, outcome.reason[:26]) == (NOT_RUN, "Failed to find C compiler."), outcome


def test_a_group_that_hangs_is_ended(
    targets: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VERIFY_TARGETS_FOLDER", str(tmp_path))
    for seconds in (10, 40, 160):  # more time if processes start slowly
        hanging = dataclasses.replace(group("hangs"), seconds=seconds)
        outcome = run.run_group(hanging, seconds=seconds, device="cpu")
        if (tmp_path / "started").exists():
            break
    assert (outcome.status, outcome.reason) == (FAILED, f"rank 0 had not ended after {seconds} s")


def test_what_there_is_no_time_for_is_not_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "TOTAL_SECONDS", 1.0)
    [outcome] = run.run_groups([group("hangs")], device="cpu")
    assert (outcome.status, outcome.reason) == (NOT_RUN, "the time was up")


def test_what_is_cut_short_is_not_run(targets: None, monkeypatch: pytest.MonkeyPatch):
    """With its full time, it might have ended."""
    monkeypatch.setattr(run, "TOTAL_SECONDS", 2.0)
    monkeypatch.setattr(run, "LEAST_SECONDS", 1.0)
    [outcome] = run.run_groups([group("hangs")], device="cpu")
    assert (outcome.status, outcome.reason) == (NOT_RUN, "the time was up")
    assert outcome.seconds > 1


def test_ranks_that_do_not_meet_are_no_wrong_kernel(
    targets: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The worker writes this file if its peer does not come."""
    monkeypatch.setenv("AXONN_TIMEOUT_SECONDS", "1")
    store, result = str(tmp_path / "store"), tmp_path / "result.json"
    task = Task("verify_targets:passes", 0, 2, store, "cpu", str(result), os.getpid())
    program = [sys.executable, "-m", "axonn_ext.verify.worker", json.dumps(vars(task))]
    done = subprocess.run(program, env=worker_environment(), check=False, timeout=HANG_SECONDS)
    assert done.returncode == NOT_RUN_STATUS
    assert json.loads(result.read_text())["unsupported"].startswith("rank 0 cannot start: ")


def test_processes_that_die_at_their_start_are_no_wrong_kernel(
    targets: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", "false")
    outcome = run.run_group(group("passes"), seconds=HANG_SECONDS, device="cpu")
    reason = f"{run.NOT_STARTED}: rank 0 ended with status 1"
    assert (outcome.status, outcome.reason) == (NOT_RUN, reason)


def test_a_process_that_cannot_be_started_ends_those_before_it(
    targets: None, monkeypatch: pytest.MonkeyPatch
):
    started: list[subprocess.Popen[bytes]] = []

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if started:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(POPEN(*args, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        run.run_group(group("hangs", num_ranks=2), seconds=HANG_SECONDS, device="cpu")
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_groups_end_with_the_command(
    targets: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    monkeypatch.setenv("VERIFY_TARGETS_FOLDER", str(tmp_path))
    command = subprocess.Popen([sys.executable, "-c", HANG], env=worker_environment())
    started = tmp_path / "started"
    commands.wait_until(lambda: started.exists() and started.read_text() != "", "the target")
    worker = Path(f"/proc/{started.read_text()}")
    assert worker.exists()
    command.send_signal(number)
    assert command.wait(HANG_SECONDS) == (7 if number == signal.SIGTERM else -number)
    commands.wait_until(lambda: not is_running(worker), "the worker's end")


def test_verdicts_by_kernel():
    one, two, four = (group(f"{n}", num_ranks=n, gpus=n) for n in (1, 2, 4))
    products = group("products", "triton")

    def verdict(*statuses: tuple[Group, str]) -> dict[str, Verdict]:
        return run.verdicts_of(Outcome(g, status, "why") for g, status in statuses)

    passed = verdict((one, PASSED), (two, PASSED), (four, PASSED), (products, PASSED))
    assert passed == {"fused": Verdict(ranks=4), "triton": Verdict()}
    # Between fewer GPUs than the machine has: they cannot access each other, or time was up.
    assert verdict((one, PASSED), (two, PASSED), (four, NOT_RUN)) == {"fused": Verdict(ranks=2)}
    assert verdict((one, NOT_RUN), (two, PASSED), (products, NOT_RUN)) == {}
    failed = verdict((one, PASSED), (four, FAILED), (products, PASSED))
    assert failed["fused"].reasons == {"4": "why"} and failed["triton"].passed


def test_ranks_are_those_between_which_every_group_has_passed():
    """There are groups of ops and of Linears; possibly only one of them has passed."""

    def ranks(*statuses: tuple[int, str]) -> int:
        outcomes = [
            Outcome(group(f"{n}", gpus=size), status, "why")
            for n, (size, status) in enumerate(statuses)
        ]
        return run.verdicts_of(outcomes)["fused"].ranks

    assert ranks((1, PASSED), (2, PASSED), (2, PASSED), (4, PASSED), (4, PASSED)) == 4
    assert ranks((1, PASSED), (2, PASSED), (2, PASSED), (4, PASSED), (4, NOT_RUN)) == 2
    assert ranks((1, PASSED), (2, NOT_RUN), (2, PASSED), (4, NOT_RUN), (4, PASSED)) == 1


def test_groups_for_the_gpus_that_there_are():
    for num_gpus, worlds in ((1, {1}), (2, {1, 2}), (3, {1, 2}), (4, {1, 2, 4}), (16, {1, 2, 8})):
        found = groups.groups(num_gpus)
        assert {g.gpus for g in found} == worlds
        assert {g.kernel for g in found} == set(verified.KERNELS)
        assert len({g.name for g in found}) == len(found)
        for g in found:
            module, _, function = g.target.partition(":")
            assert module == groups.__name__ and callable(getattr(groups, function))
            assert g.num_ranks in (g.gpus, 2)


def test_kernels_that_triton_compiles_get_the_time_for_it(monkeypatch: pytest.MonkeyPatch):
    plain = groups.groups(2)
    assert not any(g.compile_seconds for g in plain)
    monkeypatch.setattr(groups, "gemm_source", lambda: "triton")
    for before, now in zip(plain, groups.groups(2), strict=True):
        more = groups.TRITON_SECONDS if now.kernel == verified.FUSED else 0.0
        assert now == dataclasses.replace(
            before, seconds=before.seconds + more, compile_seconds=more
        )
    assert groups.shapes_of(torch.float16) == virtual.SHAPES[:1]
    assert groups.shapes_of(torch.bfloat16) == virtual.SHAPES


# In a separate process, as the suggestion appears once per process.
SUGGEST = """
import sys
from pytest import MonkeyPatch
from axonn_ext.kernels.verified import Stamp
from stamp_cases import H100, RIGHT, WRONG, measured_products
for stamp in (Stamp(H100, RIGHT), Stamp(H100, RIGHT | {"fused_sm90": WRONG})):
    measured_products(MonkeyPatch(), stamp)
print("without a stamp:", file=sys.stderr)
for _ in range(2):
    measured_products(MonkeyPatch(), None)
"""


def test_verify_is_suggested_once(targets: None):
    hint = "before `axonn-ext verify` (3 minutes) has found them right here"
    program = [sys.executable, "-c", SUGGEST]
    done = subprocess.run(
        program, env=worker_environment(), capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, done.stderr
    before, _, after = done.stderr.partition("without a stamp:")
    assert (before.count(hint), after.count(hint)) == (0, 1)


# --- The command ----------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_2():
    """The process has not loaded torch."""
    verify = 'status = main(["verify"]); sys.exit("torch" if "torch" in sys.modules else status)'
    program = f"import sys; from axonn_ext.cli import main; {verify}"
    done = commands.run([sys.executable, "-c", program])
    assert done.status == 2
    [line] = done.output.splitlines()
    assert line.startswith("error: axonn-ext verify needs an NVIDIA GPU, and ")
    assert "run it where the job will run" in line


def test_the_users_mistakes(capsys: pytest.CaptureFixture[str]):
    assert main(["verify", "--fast"]) == 2
    assert "unknown argument --fast" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hip", "cuda", "why"),
    [
        ("7.1.2", None, "torch is built for ROCm 7.1.2"),
        (None, None, "the torch that is installed is a CPU build"),
        (None, "13.0", "torch sees none here"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_why_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, cuda: str | None, why: str
):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(UserError, match=why):
        command.find_gpus()


def run_command(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[Outcome], cache_dir: Path, file: Path
) -> int:
    """Runs the command on a machine that seems to have an H100."""
    monkeypatch.setattr(command, "DEVICE_FILES", ("null",))
    monkeypatch.setattr(command, "find_gpus", lambda: (4, H100.gpu))
    monkeypatch.setattr(command, "key_of", lambda gpu: H100)
    monkeypatch.setattr(run, "run_groups", lambda groups: iter(outcomes))
    monkeypatch.setenv("AXONN_CACHE_DIR", str(cache_dir))
    return main(["verify", "--json", str(file)])


def test_what_it_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    outcomes = [
        Outcome(g, PASSED if g.kernel != "triton" else FAILED, "wrong", 7, 1.0)
        for g in groups.groups(4)
    ]
    file = tmp_path / "found.json"
    assert run_command(monkeypatch, outcomes, tmp_path / "cache", file) == 1
    stamp = verified.find(tmp_path / "cache", H100)
    assert stamp is not None and stamp.verdicts["fused"] == Verdict(ranks=4)
    assert stamp.verdicts["triton"].reasons == {"triton: products": "wrong"}
    document = json.loads(file.read_text())
    assert document["key"] == dataclasses.asdict(H100)
    assert document["stamp"] == str(verified.path_of(tmp_path / "cache", H100))
    assert {g["group"]["name"] for g in document["groups"]} == {o.group.name for o in outcomes}
    printed = capsys.readouterr().out
    assert "triton: products" in printed and 'triton: FAILED; "auto" does not use it' in printed
    assert 'fused: right; "auto" measures it in groups of up to 4 ranks' in printed

    outcomes = [dataclasses.replace(o, status=PASSED) for o in outcomes]
    assert run_command(monkeypatch, outcomes, tmp_path / "cache", file) == 0
    stamp = verified.find(tmp_path / "cache", H100)
    assert stamp is not None and all(v.passed for v in stamp.verdicts.values())


def test_what_an_earlier_run_has_found_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The new run uses one of the GPUs, with too little time for triton."""
    verified.keep(tmp_path, Stamp(H100, {"fused": Verdict(ranks=8), "triton": WRONG}))
    monkeypatch.setenv("AXONN_PRODUCT_KERNELS", "triton")
    outcomes = [Outcome(g, PASSED if g.kernel != "triton" else NOT_RUN) for g in groups.groups(1)]
    assert run_command(monkeypatch, outcomes, tmp_path, tmp_path / "found.json") == 0
    stamp = verified.find(tmp_path, H100)
    assert stamp is not None and stamp.verdicts["triton"] == WRONG
    assert stamp.verdicts["fused"] == Verdict(ranks=8)
    printed = capsys.readouterr().out
    assert 'fused: right; "auto" measures it in groups of up to 8 ranks' in printed
    assert "triton: not verified, see above; before, FAILED: fused: sums, virtual ranks" in printed
    assert 'cublaslt: right; "auto" does not measure it: AXONN_PRODUCT_KERNELS' in printed


def test_where_nothing_can_be_kept_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("")
    outcomes = [Outcome(g, PASSED) for g in groups.groups(1)]
    status = run_command(monkeypatch, outcomes, tmp_path / "file", tmp_path / "found.json")
    assert status == 0
    printed = capsys.readouterr().out
    assert "not kept, so that nothing changes for auto: " in printed
    assert "fused_sm90: right\n" in printed and '"auto"' not in printed
