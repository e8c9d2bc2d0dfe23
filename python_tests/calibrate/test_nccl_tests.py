"""`axonn-ext machine`: turns logs of nccl-tests into links of a machine."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from axonn_ext.calibrate.nccl_tests import KINDS, read_log
from axonn_ext.cli import main
from axonn_ext.planner.machines.machine import load_machine, machine_file
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import read_text
from axonn_ext.spec.grid import GridShape

HEAD = """\
# nccl-tests version 2.17.6 nccl-headers=22803 nccl-library=22803
# nThread 1 nGpus 1 minBytes 1024 maxBytes 8589934592 step: 2(factor) warmup iters: 1 iters: 20
#
# Using devices
"""
COLUMNS = """\
#
#                                                              out-of-place               in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)
"""
STEPS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


def log(
    kind: str, num_ranks: int, *, groups: int = 1, gbps: float = 100.0, latency_us: float = 5.0,
    noise: float = 0.0, seed: int = 0,
) -> str:  # fmt: skip
    """Returns a log of groups of every groups-th rank, with this bandwidth, and latency per step.

    The times have as many digits as nccl-tests print.
    """
    chance, size = random.Random(seed), num_ranks // groups
    ranks = [
        f"#  Rank {rank:2d} Group {rank % groups:2d} Pid  1234 on node{rank // 8} device "
        f"{rank % 8:2d} [0000:1b:00] NVIDIA H100 80GB HBM3\n"
        for rank in range(num_ranks)
    ]
    rows = []
    for power in range(10, 34):
        sent = STEPS[kind] * 2**power * (size - 1) // size
        us = STEPS[kind] * (size - 1) * latency_us + sent / gbps / 1e3
        us *= 1 + noise * chance.uniform(-1, 1)
        shown = f"{us:.2f}" if us < 1e4 else f"{us:.0f}"
        rows.append(
            f"{2**power:12d} {2**power // 4:12d}     float    none      -1 {shown:>8} "
            f"{2**power / us / 1e3:7.2f} {sent / us / 1e3:7.2f}       0 {2 * us:8.2f} "
            f"{1.0:7.2f} {1.0:7.2f}       0\n"
        )
    tail = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 100\n#\n"
    return HEAD + "".join(ranks) + COLUMNS + "node0:1234 [0] NCCL INFO x\n" + "".join(rows) + tail


def written(folder: Path, text: str, name: str = "a.log") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_ranks", "groups"), [(2, 1), (8, 1), (16, 8), (24, 1), (64, 8)])
def test_bandwidth_and_latency_are_those_of_the_log(
    kind: str, num_ranks: int, groups: int, tmp_path: Path
) -> None:
    text = log(kind, num_ranks, groups=groups, gbps=43.5, latency_us=7.5)
    row, total = read_log(written(tmp_path, text), kind)
    assert (row.inner, row.size, total) == (groups, num_ranks // groups, num_ranks)
    # Times have four or more digits; only the smallest message's, at least 7.5 us, may have three.
    assert row.line.bytes_per_s == pytest.approx(43.5e9, rel=1e-3)
    assert row.latency_s == pytest.approx(7.5e-6, rel=0.01)


def test_noise_of_some_per_cent_changes_the_bandwidth_by_less(tmp_path: Path) -> None:
    text = log("all_gather", 16, gbps=43.5, noise=0.03, seed=3)
    row, _ = read_log(written(tmp_path, text), "all_gather")
    assert row.line.bytes_per_s == pytest.approx(43.5e9, rel=0.03)


def test_a_log_without_groups_and_root_as_older_versions_write_it(tmp_path: Path) -> None:
    text = re.sub(r" Group +\d+", "", log("all_reduce", 8, gbps=20.0))
    text = text.replace("redop    root ", "redop ").replace("none      -1", "sum")
    row, _ = read_log(written(tmp_path, text), "all_reduce")
    assert (row.inner, row.size) == (1, 8)
    assert row.line.bytes_per_s == pytest.approx(20e9, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: "", "expected lines"),
        (lambda text: text.replace("# Rank  0", "#"), "expected lines"),
        (lambda text: text.replace("(us)", "(ms)"), "times in us"),
        (lambda text: text.replace("#       size", "#       what"), "times in us"),
        (lambda text: re.sub(r"(?m)^ +\d+ .*\n", "", text), "at least three sizes, got 0"),
        (lambda text: text.replace("Rank  3 Group  0", "Rank  3 Group  1"), "equally many ranks"),
        (lambda text: re.sub(r"(-1 +)\S+", r"\1fast", text, count=1), "expected numbers"),
    ],
)
def test_what_is_no_log(change: object, expected: str, tmp_path: Path) -> None:
    text = change(re.sub(r"#  Rank", "# Rank", log("all_gather", 8)))  # type: ignore[operator]
    with pytest.raises(InputError) as raised:
        read_log(written(tmp_path, text), "all_gather")
    assert expected in str(raised.value) and "a.log" in str(raised.value)


def test_a_log_of_another_collective_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path, log("all_reduce", 8))
    with pytest.raises(InputError, match="does not fit all_gather of 8 ranks"):
        read_log(path, "all_gather")


# --- The command ---------------------------------------------------------------------------------


def test_a_machine_with_measured_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Uses frontier, whose file has measured rows in its first level, and comments throughout."""
    inside = written(tmp_path, log("all_gather", 8, gbps=120.0), "inside.log")
    across = written(tmp_path, log("all_gather", 64, groups=8, gbps=9.0), "across.log")
    out = tmp_path / "lab.toml"
    logs = ["--log", f"all_gather={inside}", "--log", f"all_gather={across}"]
    assert main(["machine", "--base", "frontier", *logs, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"all_gather +node +1 +8 +120\.0", shown)
    assert re.search(r"all_gather +cluster +8 +8 +9\.0", shown)
    own, machine = load_machine("frontier"), load_machine(str(out))
    assert machine.name == "lab" and "inside.log, across.log" in out.read_text()
    measured = machine.link(GridShape(x=8), "x").by_kind
    assert measured is not None
    assert measured["all_gather"].bytes_per_s == pytest.approx(120e9, rel=1e-3)
    spread = machine.link(GridShape(x=8, data=8), "data").by_kind
    assert spread is not None
    assert spread["all_gather"].bytes_per_s == pytest.approx(9e9, rel=1e-3)
    # Rows of other groups, and all other numbers and comments, stay.
    kept = {(r.inner, r.size) for r in own.links.levels[0].measured} - {(1, 8)}
    assert kept < {(r.inner, r.size) for r in machine.links.levels[0].measured}
    assert machine.peak_flops == own.peak_flops and machine.products == own.products
    assert "# RCCL's buffers: 9.6 MB to send" in out.read_text()


def test_a_machine_whose_base_has_the_links(tmp_path: Path) -> None:
    assert "[[levels]]" not in read_text(machine_file("dgx-h200"))
    path, out = written(tmp_path, log("all_gather", 8, gbps=300.0)), tmp_path / "lab.toml"
    logs = ["--log", f"all_gather={path}"]
    assert main(["machine", "--base", "dgx-h200", *logs, "--out", str(out)]) == 0
    machine, known = load_machine(str(out)), load_machine("dgx-h200")
    links = machine.link(GridShape(x=8), "x").by_kind
    assert links is not None
    assert links["all_gather"].bytes_per_s == pytest.approx(300e9, rel=1e-3)
    assert machine.links.levels[1] == known.links.levels[1]
    assert (machine.memory_bytes, machine.products) == (known.memory_bytes, known.products)


def test_several_collectives_of_one_group(tmp_path: Path) -> None:
    out = tmp_path / "lab.toml"
    speeds = {"all_gather": 300.0, "reduce_scatter": 250.0, "all_reduce": 400.0}
    logs: list[str] = []
    for kind, gbps in speeds.items():
        path = written(tmp_path, log(kind, 8, gbps=gbps), f"{kind}.log")
        logs += ["--log", f"{kind}={path}"]
    assert main(["machine", "--base", "dgx-h100", *logs, "--out", str(out)]) == 0
    links = load_machine(str(out)).link(GridShape(x=8), "x").by_kind
    assert links is not None
    found = {kind: links[kind].bytes_per_s / 1e9 for kind in speeds}
    assert found == pytest.approx(speeds, rel=1e-3)


def test_tables_behind_the_rows_that_give_way_stay(tmp_path: Path) -> None:
    known = read_text(machine_file("frontier"))
    start, end = known.index("[matmul]"), known.index("# Rates:")
    moved = known[:start] + known[end:]
    last = """
[[levels.measured]]  # gives way
inner = 8
size = 8
bytes_per_s = 1e9
"""
    base = tmp_path / "base.toml"
    base.write_text(moved + last + known[start:end])
    path, out = written(tmp_path, log("all_gather", 64, groups=8, gbps=9.0)), tmp_path / "lab.toml"
    arguments = ["--base", str(base), "--log", f"all_gather={path}", "--out", str(out)]
    assert main(["machine", *arguments]) == 0
    machine = load_machine(str(out))
    assert machine.products == load_machine("frontier").products
    assert [(r.kind, r.inner, r.size) for r in machine.links.levels[-1].measured] == [
        ("all_gather", 8, 8)
    ]


def test_a_base_that_writes_its_levels_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = read_text(machine_file("ethernet"))
    line = 'levels = [{ name = "node", bytes_per_s = 1e9, latency_s = 1e-6 }]\n'
    base = tmp_path / "base.toml"
    base.write_text(line + known[: known.index("[[levels]]")])
    path, out = written(tmp_path, log("all_gather", 8)), tmp_path / "lab.toml"
    arguments = ["--base", str(base), "--log", f"all_gather={path}", "--out", str(out)]
    assert main(["machine", *arguments]) == 2
    assert "--base: expected a file with tables [[levels]]" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--base", "dgx-h10"], ["unknown machine 'dgx-h10'", "did you mean dgx-h100"]),
        (["--log", "broadcast=a.log"], ["--log", "KIND=FILE", "'broadcast=a.log'"]),
        (["--log", "all_gather"], ["--log", "KIND=FILE", "'all_gather'"]),
        (["--log", "all_gather=missing.log"], ["missing.log", "No such file"]),
        (["--log", "all_gather={log}"], ["--log", "both have all_gather of 8 ranks"]),
        (["--out", "lab.txt"], ["--out", ".toml", "lab.txt"]),
        (["--out", "/nowhere/lab.toml"], ["--out", "/nowhere"]),
    ],
)
def test_mistakes(
    arguments: list[str], expected: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = written(tmp_path, log("all_gather", 8))
    out = tmp_path / "lab.toml"
    base = ["machine", "--base", "dgx-h100", "--log", f"all_gather={path}", "--out", str(out)]
    assert main([*base, *(a.format(log=path) for a in arguments)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert all(text in message for text in expected), message
    assert not out.exists()
