"""`axonn-ext verify` of some groups, or interrupted: the results that it keeps; without a GPU."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path

import pytest

import commands
from axonn_ext.cli import verify as command
from axonn_ext.kernels import verified
from axonn_ext.kernels.verified import Stamp, Verdict
from axonn_ext.terminal.errors import UserError
from axonn_ext.verify import groups
from axonn_ext.verify.record import Record
from axonn_ext.verify.run import FAILED, NOT_RUN, PASSED, Outcome
from stamp_cases import H100
from verify_on_cpu import verify_command

pytestmark = pytest.mark.long


# --- What is kept, and when -----------------------------------------------------------------------


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_no_part_of_a_run_unlocks_what_it_did_not_check(num_gpus: int):
    """Tries every choice of groups, all of which pass."""
    all_groups = groups.groups(num_gpus)
    for chosen in itertools.product((True, False), repeat=len(all_groups)):
        record = Record(None, all_groups)
        ran = [group for group, is_run in zip(all_groups, chosen, strict=True) if is_run]
        for group in ran:
            record.add(Outcome(group, PASSED))
        missing = [group for group in all_groups if group not in ran]
        whole = set(verified.KERNELS) - {group.kernel for group in missing if group.gpus == 1}
        assert set(record.verdicts) == {group.kernel for group in ran} & whole
        if "fused" in record.verdicts:
            found = verified.unlocked(None, [Stamp(H100, record.verdicts)])
            apart = any(group.gpus > 1 for group in missing)
            assert found.fused_ranks == (1 if apart else num_gpus)


def test_a_stamp_is_complete_after_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AXONN_CACHE_DIR", str(tmp_path))
    all_groups = groups.groups(1)

    def keep(names: tuple[str, ...], status: str) -> Stamp | None:
        record = Record(H100, all_groups)
        for group in all_groups:
            if group.name.startswith(names):
                record.add(Outcome(group, status, "wrong" if status == FAILED else ""))
        return verified.find(tmp_path, H100)

    assert keep(("fused: gathers",), PASSED) is None, "there is nothing to tell"
    assert keep(("fused: gathers",), FAILED) == Stamp(
        H100, {"fused": Verdict(reasons={"fused: gathers, virtual ranks": "wrong"})}, False
    )
    # It was wrong, and only some of its groups have passed since.
    assert keep(("fused: gathers", "fused: sums"), PASSED) == verified.find(tmp_path, H100)
    stamp = keep(("fused_sm90",), PASSED)
    assert stamp is not None and stamp.verdicts["fused_sm90"].passed and not stamp.complete
    assert not stamp.verdicts["fused"].passed
    stamp = keep(("",), PASSED)
    assert stamp is not None and stamp.complete
    assert all(verdict.passed for verdict in stamp.verdicts.values())
    stamp = keep(("triton",), FAILED)
    assert stamp is not None and stamp.complete, "all was looked at once"


def test_a_run_without_results_is_complete_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another job may use the GPU's memory, for example. Trying again and again would not help."""
    monkeypatch.setenv("AXONN_CACHE_DIR", str(tmp_path))
    record = Record(H100, groups.groups(1))
    for group in groups.groups(1):
        record.add(Outcome(group, NOT_RUN))
    assert verified.find(tmp_path, H100) == Stamp(H100, {}, complete=True)


def test_only_chooses_groups_by_how_their_names_begin():
    all_groups = groups.groups(4)

    def names(patterns: str) -> list[str]:
        return [group.name for group in command.groups_named(all_groups, patterns)]

    assert names("triton") == ["triton: products"]
    assert {group.kernel for group in command.groups_named(all_groups, "fused:")} == {"fused"}
    assert set(names("fused")) == {*names("fused:"), *names("fused_sm90")}
    assert names("fused: gathers, virtual ranks,cublaslt") == [
        "fused: gathers, virtual ranks", "cublaslt: products"
    ]  # fmt: skip
    assert names("fused: ops, 2 GPUs") == ["fused: ops, 2 GPUs"]
    mistakes = {"triton,fuse d": "fuse d", "": "", "triton,": "", "triton, cub": "triton, cub"}
    for patterns, wrong in mistakes.items():
        with pytest.raises(
            UserError, match=rf"--only: expected how a group's name begins, got '{wrong}'"
        ):
            names(patterns)


# --- A run on the CPU -----------------------------------------------------------------------------


def test_a_run_of_a_few_groups_keeps_what_they_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AXONN_CACHE_DIR", str(tmp_path))
    file = tmp_path / "found.json"
    cases = ("fused=passes", "fused=fails", "fused_sm90=passes", "triton=passes")
    only = ("--only", "fused_sm90,fused: passes", "--json", str(file))
    done = commands.run(verify_command(*cases, arguments=only))
    assert done.status == 0, done.output
    assert done.output.splitlines()[0].split() == ["cases", "number", "seconds", "why"]
    assert "fused: not verified, see above" in done.output
    document = json.loads(file.read_text())
    assert [found["status"] for found in document["groups"]] == [PASSED, PASSED]
    assert set(document["kernels"]) == {"fused_sm90"}
    assert verified.find(tmp_path, H100) == Stamp(H100, {"fused_sm90": Verdict()}, complete=False)


def test_a_run_that_is_killed_has_left_what_it_knew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AXONN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("VERIFY_TARGETS_FOLDER", str(tmp_path))
    file, printed = tmp_path / "found.json", tmp_path / "printed"
    file.write_text("of an earlier run, and longer than what comes\n" * 100)
    cases = ("fused_sm90=passes", "fused=passes", "fused=hangs")
    running = commands.start(
        verify_command(*cases, arguments=("--json", str(file))), output=printed
    )
    try:
        commands.wait_until((tmp_path / "started").exists, "the last group")
    finally:
        running.send_signal(signal.SIGKILL)
        assert running.wait(300) == -signal.SIGKILL
    document = json.loads(file.read_text())
    assert [found["status"] for found in document["groups"]] == [PASSED, PASSED]
    assert set(document["kernels"]) == {"fused_sm90"}
    stamp = verified.find(tmp_path, H100)
    assert stamp is not None and not stamp.complete
    assert document["stamp"] == str(verified.path_of(tmp_path, H100))
    assert stamp.verdicts == {"fused_sm90": Verdict()}
    lines = printed.read_text().splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == ["fused_sm90", "fused"]
    assert {path.name for path in tmp_path.iterdir()} >= {"found.json"}
    assert not list(tmp_path.glob(".*"))
