"""Invalid files, numbers and variables are named in one line, before any work starts."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from axonn_ext.cli import main, streams
from axonn_ext.spec import settings
from axonn_ext.terminal import files
from axonn_ext.terminal.errors import TrainingError, UserError
from test_cli import write_run

Capture = pytest.CaptureFixture[str]
PLAN = ("plan", "--model", "gpt2-small", "--machine", "dgx-a100", "--gpus", "8",
        "--global-batch", "64")  # fmt: skip
RANKING = ("bench", "ranking", "--machine", "host", "--nproc", "4")
LONGEST = 2000  # maximum characters of a message


def refusal(arguments: list[str], capsys: Capture) -> str:
    """The error message: a few lines at most, with status 2 and no other output."""
    status = main(arguments)
    printed = capsys.readouterr()
    assert status == 2, (arguments, printed.err)
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert 1 <= len(lines) <= 4 and all(line.startswith(("error: ", "  ")) for line in lines)
    assert len(printed.err) < LONGEST
    return printed.err


# --- Inputs --------------------------------------------------------------------------------------


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, str]:
    """Files that no command can use, by their defect."""
    contents = {
        "binary": bytes(range(256)),
        "5000 digits": b"[train]\nsteps = " + b"1" * 5000,
        "brackets": b"a = " + b"[" * 20_000,
        "cut": b"[train\n",
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.toml").write_bytes(content)
    (tmp_path / "folder.toml").mkdir()
    names = {name: str(tmp_path / f"{name}.toml") for name in (*contents, "folder", "missing")}
    return names | {
        "300 characters": "x" * 300 + ".toml",
        "5000 characters": "x" * 5000 + ".toml",
        "no such user": "~nosuch/x.toml",
        "not UTF-8": "a\udcff.toml",
        "endless": "/dev/zero",
    }


@pytest.mark.parametrize(
    ("option", "command"),
    [
        ("--config", ("train", "--nproc", "1", "--config")),
        ("", ("plan", *PLAN[3:], "--model")),
        ("", ("plan", *PLAN[1:3], *PLAN[5:], "--machine")),
        ("--model", ("tune", "--model")),
        ("--machine", ("bench", "ranking", "--machine")),
        ("--times", (*RANKING, "--times")),
    ],
)
def test_inputs_that_cannot_be_read(
    option: str, command: tuple[str, ...], inputs: dict[str, str], capsys: Capture
) -> None:
    for what, name in inputs.items():
        if what == "endless" and option not in ("--config", "--machine", "--times"):
            continue  # the other options take models, which are not .toml files
        error = refusal([*command, name], capsys)
        assert option in error, what
        if what not in ("5000 characters", "not UTF-8"):  # these are shown in another form
            assert name in error, what


def test_links_in_a_circle(tmp_path: Path, capsys: Capture) -> None:
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    loops = "Too many levels of symbolic links"
    for arguments, expected in (
        (["plan", *PLAN[3:], "--model", str(loop)], f"{loop}: cannot be read: {loops}"),
        (["plan", *PLAN[3:], "--model", f"{loop}/config.json"], f"cannot be read: {loops}"),
        (["train", "--nproc", "1", "--config", str(loop)], loops),
        ([*PLAN, "--json", str(loop)], f"--json: cannot write {loop}: {loops}"),
        ([*PLAN, "--json", f"{loop}/x"], f"--json: cannot write {loop}/x: {loops}"),
    ):
        assert expected in refusal(arguments, capsys)


@pytest.mark.parametrize("key", ["data.text", "data.vocabulary"])
def test_text_and_vocabulary_that_cannot_be_read(key: str, capsys: Capture) -> None:
    pytest.importorskip("tokenizers")
    for name, reason in (
        ("~nosuch/x", "cannot expand ~nosuch/x"),
        ("x" * 300, "File name too long"),
        ("x" * 5000, "File name too long"),
        ("a\udcff", "text in UTF-8"),
    ):
        error = refusal(["train", "--nproc", "1", f"--{key}", name], capsys)
        assert reason in error and (key in error or "tokenizers JSON" in error)


def test_metrics_that_are_none(tmp_path: Path, capsys: Capture) -> None:
    good = write_run(tmp_path / "good", [1.0])
    line = (good / "metrics.jsonl").read_text().splitlines()[0]
    bad = tmp_path / "bad"
    bad.mkdir()
    for content, expected in (
        (bytes(range(256)), "is not text: byte 128 is 0x80"),
        (line.replace('"loss": 1.0', '"loss": "1"').encode(), 'loss: expected a number, got "1"'),
        (line.replace('"loss": 1.0', '"loss": null').encode(), "loss: expected a number, got null"),
        (line.replace('"loss": 1.0', f'"loss": {"1" * 400}').encode(), "loss: expected a number"),
        (line.replace('"step": 1,', '"step": true,').encode(), "step: expected a whole number"),
        (line.replace('"tokens": 100', '"tokens": "100"').encode(), "tokens: expected a whole"),
        (b'{"eval_loss": "x", "step": 1, "tokens": 1}', "eval_loss: expected a number"),
        (b"[1]", "is not a line of metrics: expected the keys step, loss"),
        (b"[" * 20_000, "nested too deeply"),
        (b"1" * 5000, "is not JSON: Exceeds the limit"),
    ):  # fmt: skip
        (bad / "metrics.jsonl").write_bytes(content)
        error = refusal(["compare", str(good), str(bad)], capsys)
        assert expected in error and "metrics.jsonl" in error


# --- Outputs -------------------------------------------------------------------------------------


def test_outputs_that_cannot_be_written(tmp_path: Path, capsys: Capture) -> None:
    """Each is refused before any work, without output or leftover files."""
    (tmp_path / "folder.json").mkdir()
    names = {
        "/proc/x": "cannot write /proc/x",
        "x" * 300: "File name too long",
        "x" * 5000: "File name too long",
        str(tmp_path / "none" / "x"): "there is no folder",
        str(tmp_path / "folder"): "is a folder",
    }
    commands = {
        "--json": [[*PLAN], ["doctor"], ["tune", "--shapes", "64,64,64"],
                   ["bench", "linear", "--grid", "1x1x1", "--rounds", "1"], [*RANKING],
                   ["bench", "train", "--nproc", "1"], ["bench", "gemm"]],
        "--plot": [[*PLAN], ["bench", "linear", "--rounds", "1"], ["bench", "train"]],
        "--write-config": [[*PLAN]],
        "--timeline": [[*PLAN]],
        "--markdown": [[*RANKING]],
    }  # fmt: skip
    suffixes = {"--plot": ".png", "--timeline": ".json", "--json": ".json"}
    before = sorted(tmp_path.rglob("*"))
    for option, starts in commands.items():
        for start in starts:
            for name, expected in names.items():
                if name == str(tmp_path / "folder") and option != "--json":
                    continue
                error = refusal([*start, option, name + suffixes.get(option, "")], capsys)
                assert option in error and expected in error
    assert sorted(tmp_path.rglob("*")) == before
    for name in ("/proc/x", "x" * 300, "x" * 5000):
        assert "--out" in refusal(["train", "--nproc", "1", "--out", name], capsys)


def test_a_file_that_exists_is_kept_until_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("of yesterday")
    files.check_writable("--json", path)
    assert path.read_text() == "of yesterday"
    files.check_writable("--json", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    files.check_writable("--json", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "target").exists()
    (tmp_path / "link2").symlink_to(tmp_path / "none" / "target")
    with pytest.raises(UserError, match="--json: cannot write"):
        files.check_writable("--json", tmp_path / "link2")


def test_a_disk_that_is_full_meanwhile(tmp_path: Path, capsys: Capture) -> None:
    """/dev/full can be opened but not written: one line, and status 1 as work was done."""
    full = tmp_path / "full.png"
    full.symlink_to("/dev/full")
    for option in ("--json", "--write-config", "--plot"):
        assert main([*PLAN, option, str(full)]) == 1
        error = capsys.readouterr().err
        assert error == (
            f"error: {option}: cannot write {full}: No space left on device; it is not complete\n"
        )
    with pytest.raises(TrainingError, match="No space left on device"):
        files.write_text("--json", Path("/dev/full"), "x")


# --- Numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["compare", "a", "b", "--tolerance", "nan"], "--tolerance: expected a finite number >= 0"),
        (["compare", "a", "b", "--tolerance", "-1"], "--tolerance: expected a finite number >= 0"),
        (["tune", "--shapes", "8,8,8", "--threads", "3000000000"], "<= 1024, got 3000000000"),
        (["tune", "--shapes", "1000000000000,64,64"], "needs at least"),
        (["tune", "--shapes", "9" * 5000 + ",64,64"], '"M,N,K"'),
        (["tune", "--model", "gpt2-small", "--batch", "1000000000000"], "needs at least"),
        (["bench", "linear", "--threads", "3000000000"], "--threads: expected a whole number <="),
        (["bench", "linear", "--rounds", "9" * 400], "--rounds: expected a whole number <="),
        (["bench", "ag-gemm", "--shapes", "1000000000000,8,8"], "GB of memory, but this machine"),
        (["bench", "block", "--shapes", "2,2,1000000000000,2"], "GB of memory, but this machine"),
        (["bench", "ag-gemm", "--world", "3000000000"], "--world: expected a whole number <= 1024"),
        (["bench", "linear", "--grid", "x=512,y=4"], "2048 processes, but at most 1024"),
        (["bench", "linear", "--grid", "x=" + "9" * 5000], "--grid x=9"),
        (["bench", "links", "--nproc", "3000000000"], "--nproc: expected a whole number <= 1024"),
        (["bench", "train", "--nproc", "1", "--hidden", "1000000000000"], "needs at least"),
        (["bench", "train", "--nproc", "1", "--layers", "1000000000000"], "needs at least"),
        (["bench", "train", "--nproc", "1", "--batch", "0"], "--batch: expected a whole number >="),
        ([*PLAN, "--memory-fraction", "nan"], "--memory-fraction: expected a finite number > 0"),
        ([*PLAN, "--tokens", "inf"], "--tokens: expected a finite number > 0"),
        ([*PLAN, "--seq", "1e300"], "--seq: expected a whole number <= 1000000000000"),
        (["train", "--nproc", "3000000000"], "--nproc: expected a whole number <= 1024"),
        (["train", "--grid", "data=2000", "--train.batch_size=2000"], "at most 1024 are started"),
        (["train", "--nproc", "1", "--train.threads", "3000000000"], "train.threads: expected a"),
        (["train", "--nproc", "1", "--train.steps", "1" * 400], "<= 1000000000000, got 1111"),
        (["train", "--nproc", "1", "--train.steps", "1" * 5000], 'got "1111'),
        (["train", "--nproc", "1", "--optim.lr", "1e300"], "optim.lr: expected a finite number <="),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be(arguments: list[str], expected: str, capsys: Capture) -> None:
    assert expected in refusal(arguments, capsys)


@pytest.mark.parametrize(
    "key", ["num_layers", "hidden_size", "vocab_size", "intermediate_size", "batch_size"]
)
def test_memory_is_checked_before_a_huge_model_is_made(
    key: str, tmp_path: Path, capsys: Capture
) -> None:
    table = "train" if key == "batch_size" else "model"
    arguments = ["train", "--nproc", "1", f"--{table}.{key}", "1000000000000"]
    folder = tmp_path / "run"
    error = refusal([*arguments, "--model.num_heads=1", "--out", str(folder)], capsys)
    assert "needs at least" in error and "GB of memory, but this machine has" in error
    assert not folder.exists()


def test_numbers_of_400_digits_in_a_file(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.toml"
    for table, key in (("train", "steps"), ("optim", "lr"), ("model", "num_layers")):
        path.write_text(f"[{table}]\n{key} = {'1' * 400}\n")
        error = refusal(["train", "--nproc", "1", "--config", str(path)], capsys)
        most = "3.4e+38" if key == "lr" else "1000000000000"
        assert f"{table}.{key}: expected a" in error and f"<= {most}" in error
    assert "num_layers must be a whole number <= " in refusal(
        ["plan", *PLAN[3:], "--model", str(path)], capsys
    )


# --- Variables -----------------------------------------------------------------------------------

LAUNCH = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
          "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AXONN_TIMEOUT_SECONDS", "soon"),
        ("AXONN_TIMEOUT_SECONDS", "-1"),
        ("AXONN_TIMEOUT_SECONDS", "nan"),
        ("AXONN_TIMEOUT_SECONDS", "1e300"),
        ("AXONN_TIMEOUT_SECONDS", "1e-300"),
        ("AXONN_SYMMETRIC_MEMORY_BYTES", "1e30"),
        ("AXONN_DEBUG_COLLECTIVES", "yes"),
        ("AXONN_FUSED_NCCL_SMS", "1e30"),
        ("AXONN_FUSED_FREE_SMS", "many"),
        ("AXONN_EMULATED_LINKS", "x=1e-300"),
        ("AXONN_PRODUCT_KERNELS", "x" * 5000),
        ("AXONN_TIMEOUT_SECOND", "5"),
        ("RANK", "abc"),
        ("RANK", "5"),
        ("RANK", "-1"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "99999999999999"),
        ("LOCAL_RANK", "q"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("MASTER_PORT", "99999"),
    ],
)
def test_variables_that_cannot_be(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for variable, usual in LAUNCH.items() if name in LAUNCH else ():
        monkeypatch.setenv(variable, usual)
    monkeypatch.setenv(name, value)
    for arguments in ([*PLAN], ["train", "--print-config"], ["compare", "a", "b"]):
        assert refusal(arguments, capsys).startswith(f"error: {name} ")


def test_an_unknown_variable_is_named_with_the_nearest() -> None:
    with pytest.raises(settings.SettingsError, match=r"did you mean AXONN_TIMEOUT_SECONDS\?"):
        settings.load({"AXONN_TIMEOUT_SECOND": "5"})
    # Variables of the build, and of another program.
    of_the_build = {"AXONN_CUDA": "0", "AXONN_CUDA_REASON": "no GPU", "AXONN_DEBUG_INFO": "1"}
    settings.load(of_the_build | {"AXONNE": "2"})


def test_doctor_reports_a_bad_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("AXONN_TIMEOUT_SECONDS", "[/soon]")  # rich would read it as markup
    path = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(path)]) == 1
    assert "[/soon]" in capsys.readouterr().out
    findings = {f["name"]: f for f in json.loads(path.read_text())["findings"]}
    assert findings["AXONN_TIMEOUT_SECONDS"]["status"] == "problem"
    assert "got '[/soon]'" in findings["AXONN_TIMEOUT_SECONDS"]["value"]
    assert findings["shared memory"]["status"] == "ok"


# --- Errors of the machine -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "error: Too many open files\n"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "error: No space left on device\n"),
        (OSError(errno.EIO, "Input/output error", "x"), "error: x: Input/output error\n"),
        (MemoryError(), "error: memory ran out\n"),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    error: Exception, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("axonn_ext.cli.compare.run", fail)
    assert main(["compare", "a", "b"]) == 1
    assert capsys.readouterr().err == expected
    assert streams.READER_GONE == 141
