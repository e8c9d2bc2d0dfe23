"""Machine files: reading, errors, and the resulting times."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from axonn_ext.planner import Machine, PlannerError, load_machine
from axonn_ext.planner.machines.machine import machine_names
from axonn_ext.planner.step.tasks import Collective, Matmul, Scores
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.grid import GridShape

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "axonn_ext" / "planner" / "machines"

GIB = 1024**3

SMALL = """
description = "a host"
source = "a test"
memory_bytes = 16_000_000_000
memory_reserved_bytes = 1_000_000_000
memory_bytes_per_s = 1e10
launch_s = 1e-5

[peak_flops]
fp32 = 1e11

[matmul]
max_efficiency = { fp32 = 0.5 }

[attention]
fp32 = 2e10

[[levels]]
name = "host"
ranks = 8
bytes_per_s = 4e9
latency_s = 2e-5
"""


def write(folder: Path, text: str, name: str = "mine.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def read(folder: Path, text: str) -> Machine:
    return load_machine(write(folder, text))


# --- Which machines there are --------------------------------------------------------------------


def test_the_machines_of_the_package() -> None:
    assert {"dgx-h100", "ethernet", "host"} <= set(machine_names())
    for name in machine_names():
        machine = load_machine(name)
        assert machine.name == name
        assert machine.usable_bytes < machine.memory_bytes
        for axis, grid in (("x", GridShape(x=2)), ("data", GridShape(x=8, z=16, data=256))):
            link = machine.link(grid, axis)
            assert 1e8 < link.bytes_per_s < 1e12
            assert 1e-7 < link.latency_s < 1e-4
        for dtype in machine.peak_flops:
            square = Matmul(8192, 8192, 8192, "NT")
            rate = square.flops / machine.matmul_seconds(square, dtype)
            assert 0.3 < rate * machine.slowdown / machine.peak_flops[dtype] < 1


def test_the_files_are_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["axonn_ext.planner"]
    folder = ROOT / "axonn_ext" / "planner"
    installed = {path for pattern in patterns for path in folder.glob(pattern)}
    assert installed == set(folder.rglob("*.toml"))


def test_every_number_has_a_source() -> None:
    """The source is in the file's `source`, or in a comment on the line or above its block."""
    keys = "slowdown", "memory_reserved_bytes", "memory_bytes_per_s", "launch_s"
    for path in FILES.glob("*.toml"):
        text = path.read_text()
        lines = [line for line in text.splitlines() if line.startswith(keys)]
        based = re.search(r'^base = "', text, re.MULTILINE) is not None
        assert based or len(lines) == len(keys), path
        assert all("#" in line for line in lines), path
        for table, source in (
            (r"^\[peak_flops\]", r"\[peak_flops\] +# (data sheet|a guess)"),
            (r"^\[\[levels\]\]", "Latencies of the steps|Latencies of ring steps|carried over"),
        ):
            found = re.search(table, text, re.MULTILINE)
            assert re.search(source, text) if found else based, path


def test_gpus_that_are_the_same_are_told_once() -> None:
    """A number with its reason may be in several files, but not tables of measurements."""
    rows = [
        line.strip()
        for path in FILES.glob("*.toml")
        for line in path.read_text().splitlines()
        if re.match(r"    \[\d+e12, ", line)
    ]
    assert len(rows) > 5
    assert len(set(rows)) == len(rows)


# --- A base --------------------------------------------------------------------------------------


def test_a_file_takes_what_it_does_not_say_from_its_base(tmp_path: Path) -> None:
    text = 'description = "mine"\nsource = "a test"\nbase = "aws-p5"\nmemory_bytes = 90e9\n'
    text += (
        "[peak_flops]\nbf16 = 1e15\n[matmul]\nnum_units = 99\n[matmul.max_efficiency]\nbf16 = 0.5\n"
    )
    text += "[attention]\nbf16 = 2e14\n"
    mine, base, its_base = read(tmp_path, text), load_machine("aws-p5"), load_machine("dgx-h100")
    assert (mine.name, mine.description, mine.memory_bytes) == ("mine", "mine", 90 * 10**9)
    assert mine.links.levels == base.links.levels != its_base.links.levels
    assert (mine.launch_s, mine.slowdown) == (its_base.launch_s, its_base.slowdown)
    # Tables are replaced as a whole, so fp32 and the tiles are gone.
    assert dict(mine.peak_flops) == {"bf16": 1e15}
    assert mine.products.num_units == 99 and not mine.products.tiles
    assert its_base.products.tiles
    assert mine.attention.flops("bf16", 2048, 128) == 2e14
    changed = load_machine(write(tmp_path, text), changes=["levels.cluster.bytes_per_s=1e9"])
    assert changed.links.levels[1].bytes_per_s == 1e9


@pytest.mark.parametrize("base", ['"lab.toml"', '"this"', '"dgx-h10"', "3"])
def test_a_base_must_be_a_machine_of_the_package(tmp_path: Path, base: str) -> None:
    with pytest.raises(InputError, match=r"mine\.toml: base must be one of alps, aws-p5, .*, got"):
        read(tmp_path, SMALL.replace("memory_bytes =", f"base = {base}\nmemory_bytes =", 1))


def test_a_base_does_not_stand_for_a_description_or_a_source(tmp_path: Path) -> None:
    for key in ("description", "source"):
        text = re.sub(f"^{key} = .*$", 'base = "host"', SMALL, flags=re.MULTILINE)
        with pytest.raises(InputError, match=f"{key} must be a text; it is missing"):
            read(tmp_path, text)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("perlmuter", "unknown machine 'perlmuter' (did you mean perlmutter?); known: alps, aws"),
        ("xyz", "unknown machine 'xyz'; known: alps"),
        ("this", "machine 'this' is not measured yet: run axonn-ext bench links"),
        ("missing/machine.toml", "missing/machine.toml: cannot be read: No such file"),
    ],
)
def test_an_unknown_machine(name: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        load_machine(name)
    assert message in str(error.value)


def test_this_machine_is_where_the_caller_says(tmp_path: Path) -> None:
    file = tmp_path / "measured.toml"
    with pytest.raises(InputError, match=r"there is no .*measured\.toml"):
        load_machine("this", this_file=file)
    file.write_text(SMALL)
    assert load_machine("this", this_file=file).name == "this"
    file.write_text('name = "lab"\n' + SMALL)
    assert load_machine("this", this_file=file).name == "lab"


# --- What is refused -----------------------------------------------------------------------------

LEVEL = SMALL[SMALL.index("[[levels]]") :]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bytes_per_s = 4e9", "bytes_per_s = nan", "levels[0].bytes_per_s must be a finite number"),
        ("bytes_per_s = 4e9", "bytes_per_s = -1.0", "levels[0].bytes_per_s must be a finite"),
        ("bytes_per_s = 4e9", "bytes_per_s = inf", "> 0, got inf"),
        ("bytes_per_s = 4e9", "bytes_per_s = true", "levels[0].bytes_per_s must be a finite"),
        ("bytes_per_s = 4e9", 'bytes_per_s = "4"', "got '4'"),
        ("latency_s = 2e-5", "latency_s = 0", "levels[0].latency_s must be a finite number > 0"),
        ("latency_s = 2e-5", "latency_s = 1\ncontention = 0.5", "contention must be a finite"),
        ("latency_s = 2e-5", "latncy_s = 2e-5", "levels[0].latency_s must be a finite number > 0; "
         "it is missing"),
        ("latency_s = 2e-5", "latency_s = 2e-5\nlatncy = 1", "unknown key in levels[0] 'latncy' "
         "(did you mean latency_s?)"),
        ("ranks = 8", "ranks = 0", "levels[0].ranks must be a whole number >= 1, got 0"),
        ("ranks = 8", "ranks = 2.5", "levels[0].ranks must be a whole number >= 1, got 2.5"),
        (LEVEL, "", "levels must be an array of at least one table; it is missing"),
        (LEVEL, LEVEL + LEVEL.replace("8", "12"), "levels[1].ranks must be a multiple of the 8 of "
         "'host', got 12"),
        (LEVEL, LEVEL + "[[levels.measured]]\ninner = 4\nsize = 4\nbytes_per_s = 1e9",
         "levels[0].measured[0].size must be such that inner * size <= ranks=8, got 4"),
        (LEVEL, LEVEL + '[[levels.measured]]\ninner = 1\nsize = 2\nbytes_per_s = 1\naxis = "w"',
         "axis must be one of x, y, z, data, pipe, got 'w'"),
        (LEVEL, LEVEL + '[[levels.measured]]\ninner = 1\nsize = 2\nbytes_per_s = 1\nkind = "sum"',
         "kind must be one of all_gather, reduce_scatter, all_reduce, send, got 'sum'"),
        ("launch_s = 1e-5", "ranks_per_core = 0.5", "ranks_per_core must be a finite number >= 1"),
        ("fp32 = 1e11", "", "peak_flops must be a table with at least one of bf16, fp16, fp32"),
        ("fp32 = 1e11", "fp32 = nan", "peak_flops.fp32 must be a finite number > 0, got nan"),
        ("fp32 = 1e11", "fp32 = 1e11\nfp8 = 1", "unknown key in peak_flops 'fp8'"),
        ("fp32 = 1e11", "fp32 = 1e11\nbf16 = 1e12", "matmul.max_efficiency.bf16 must be"),
        ("fp32 = 0.5", "fp32 = 1.5", "matmul.max_efficiency.fp32 must be a finite number > 0 and "
         "<= 1, got 1.5"),
        ("[attention]", "tiles = [[128, 0, 1.0]]\n[attention]", "matmul.tiles must be an array"),
        ("[attention]", '[[matmul.measured]]\ndtype = "fp32"\nm = 1\nn = 1\nk = 1\nlayout = "TT"\n'
         "seconds = 1\n[attention]", "matmul.measured[0].layout must be one of NT, NN, TN, got"),
        ("fp32 = 2e10", "", "attention.fp32 must be a finite number > 0; it is missing"),
        ("memory_bytes = 16_000_000_000", "memory_bytes = 10", "memory_reserved_bytes must be below"
         " memory_bytes=10, got 1000000000"),
        ("launch_s = 1e-5", "launch_s = -1e-5", "launch_s must be a finite number >= 0, got"),
        ("launch_s = 1e-5", "slowdown = 0.9", "slowdown must be a finite number >= 1, got 0.9"),
        ("launch_s = 1e-5", "hidden_share = 1.1", "hidden_share must be a finite number >= 0 and "
         "<= 1, got 1.1"),
        ('source = "a test"', "", "source must be a text; it is missing"),
        ('source = "a test"', 'source = ""', "source must be a text, got ''"),
        ('source = "a test"', "source = ", "is not TOML"),
        ("[peak_flops]\nfp32 = 1e11", "", "peak_flops must be a table; it is missing"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(InputError) as error:
        read(tmp_path, SMALL.replace(old, new, 1))
    assert str(error.value).startswith(f"{tmp_path / 'mine.toml'}: ")
    assert message in str(error.value)


# --- Links ---------------------------------------------------------------------------------------


def axonn_bandwidth(machine: str, inner: int, size: int) -> float:
    """GiB/s in the tables of AxoNN's own planner (Megatron-AxoNN, examples/comm_model.py)."""
    inside = {
        "perlmutter": {(1, 2): 76, (1, 4): 225, (2, 2): 76},
        "frontier": {(1, 2): 129, (1, 4): 52, (1, 8): 135, (2, 2): 50, (2, 4): 72, (4, 2): 36},
    }[machine]
    ranks, injected = {"perlmutter": (4, 80), "frontier": (8, 40)}[machine]
    return inside.get((inner, size), injected / min(inner, ranks))


@pytest.mark.parametrize("name", ["perlmutter", "frontier"])
def test_links_are_those_of_axonns_table(name: str) -> None:
    machine, sizes = load_machine(name), [2**i for i in range(8)]
    for inner in sizes:
        for size in sizes[1:]:
            link = machine.link(GridShape(x=inner, y=size), "y")
            expected = axonn_bandwidth(name, inner, size) * GIB
            assert link.bytes_per_s == pytest.approx(expected, rel=2e-3), (inner, size)


def test_a_ring_over_nodes_has_hops_of_both_kinds() -> None:
    machine = load_machine("dgx-a100")
    inside, between = (level.latency_s for level in machine.links.levels)
    link = machine.link(GridShape(x=2, z=16), "z")  # 4 members in each of 4 nodes
    assert link.latency_s == pytest.approx((12 * inside + 3 * between) / 15)
    assert link.bytes_per_s == pytest.approx(machine.links.levels[1].bytes_per_s / 2)
    alone = machine.link(GridShape(x=16, data=4), "data")  # one member per node
    assert alone.latency_s == pytest.approx(between)
    # If the node's rate is more than one rank can send, the rank is the limit.
    slow = dataclasses.replace(machine.links.levels[0], bytes_per_s=1e9)
    links = dataclasses.replace(machine.links, levels=(slow, machine.links.levels[1]))
    assert links.of(1, 16, "x", 16).bytes_per_s == pytest.approx(1e9)
    own = machine.link(GridShape(8, 16), "y").bytes_per_s
    assert links.of(8, 16, "y", 128).bytes_per_s == pytest.approx(own)


def test_groups_that_lie_across_nodes_have_the_network() -> None:
    """Nodes have 8 ranks, and the third group of three has ranks 6, 7 and 8."""
    machine = load_machine("dgx-a100")
    node, network = machine.links.levels
    assert machine.link(GridShape(x=3), "x").bytes_per_s == node.bytes_per_s  # one group, one node
    assert machine.link(GridShape(x=3, z=4), "x").bytes_per_s == network.bytes_per_s
    assert machine.link(GridShape(x=3, y=2, z=4), "y").bytes_per_s == network.bytes_per_s / 3
    assert machine.link(GridShape(x=12), "x").bytes_per_s == network.bytes_per_s
    assert machine.link(GridShape(x=4, z=6), "x").bytes_per_s == node.bytes_per_s


def measured(*rows: dict[str, Any]) -> str:
    text = SMALL
    for row in rows:
        lines = (f"{key} = {value!r}" for key, value in row.items())
        text += "[[levels.measured]]\n" + "\n".join(lines) + "\n"
    return text


def test_measured_links_are_exact_and_correct_their_neighbours(tmp_path: Path) -> None:
    machine = read(
        tmp_path,
        measured(
            {"inner": 1, "size": 2, "bytes_per_s": 2e9, "latency_s": 4e-5},
            {"inner": 1, "size": 8, "bytes_per_s": 1e9},
        ),
    )
    pair, four, all_of_it = (machine.link(GridShape(x=n), "x") for n in (2, 4, 8))
    assert (pair.bytes_per_s, pair.latency_s) == (pytest.approx(2e9), pytest.approx(4e-5))
    assert all_of_it.bytes_per_s == pytest.approx(1e9)
    # Halfway on a logarithmic scale; the one known latency is twice the level's.
    assert four.bytes_per_s == pytest.approx(math.sqrt(2e18))
    assert four.latency_s == pytest.approx(4e-5)
    assert machine.link(GridShape(x=2, y=2), "y").bytes_per_s < 2e9


def test_kinds_of_collectives_may_differ(tmp_path: Path) -> None:
    machine = read(
        tmp_path,
        measured(
            {"inner": 1, "size": 4, "kind": "all_gather", "bytes_per_s": 2e9, "latency_s": 1e-5},
            {"inner": 1, "size": 4, "kind": "all_reduce", "bytes_per_s": 1e9, "latency_s": 3e-5},
        ),
    )
    link = machine.link(GridShape(x=4), "x")

    def seconds(kind: str) -> float:
        return machine.collective_seconds(Collective("x", kind, 10**9, "weights"), link, 4)

    assert seconds("all_gather") == pytest.approx(0.5 + 3 * 1e-5)
    assert seconds("all_reduce") == pytest.approx(1.0 + 6 * 3e-5)
    assert 0.5 < seconds("reduce_scatter") < 1.0  # between the two measurements


def test_a_link_may_hide_its_latency(tmp_path: Path) -> None:
    """The latencies of a ring's steps overlap the transfer of bytes."""
    row = {"inner": 1, "size": 4, "bytes_per_s": 1e9, "latency_s": 1e-3}
    both = measured(row)
    longer = both.replace("[[levels]]", "[[levels]]\nhides_latency = true", 1)
    assert longer != both
    for text, seconds in ((both, (1e-3 + 3e-3, 1e-5 + 3e-3)), (longer, (3e-3, 3e-3))):
        machine = read(tmp_path, text)
        link = machine.link(GridShape(x=4), "x")
        for num_bytes, expected in zip((10**6, 10**4), seconds, strict=True):
            collective = Collective("x", "all_gather", num_bytes, "weights")
            found = machine.collective_seconds(collective, link, 4)
            assert found == pytest.approx(expected)


def test_an_axis_may_have_links_of_its_own(tmp_path: Path) -> None:
    """Emulated links, for example, give each axis its own bandwidth."""
    pair = {"inner": 1, "size": 2}
    machine = read(
        tmp_path,
        measured(
            {**pair, "bytes_per_s": 2e9},
            {**pair, "axis": "z", "bytes_per_s": 1e9},
            {**pair, "axis": "z", "size": 4, "bytes_per_s": 5e8},
        ),
    )
    assert machine.link(GridShape(x=2), "x").bytes_per_s == pytest.approx(2e9)
    assert machine.link(GridShape(z=2), "z").bytes_per_s == pytest.approx(1e9)
    assert machine.link(GridShape(z=4), "z").bytes_per_s == pytest.approx(5e8)
    # An axis without rows uses the rows for no axis: half of the level's 4e9.
    assert machine.link(GridShape(data=4), "data").bytes_per_s == pytest.approx(2e9)


def test_collectives_of_a_ring(tmp_path: Path) -> None:
    machine = read(tmp_path, SMALL)
    link = machine.link(GridShape(x=8), "x")
    for kind, steps in (("all_gather", 7), ("reduce_scatter", 7), ("all_reduce", 14)):
        c = Collective("x", kind, 8 * 10**9, "weights")
        assert machine.collective_seconds(c, link, 8) == pytest.approx(2 + steps * 2e-5)


def sent_by_all_reduce(size: int, num_bytes: int) -> Collective:
    return Collective("data", "all_reduce", 2 * (size - 1) * num_bytes // size, "gradients")


def test_all_reduces_between_nodes_take_trees_where_they_are_faster() -> None:
    """64 MiB over 128 nodes of 8: a ring has 2 * 1023 steps, the trees 7 hops up and 7 down."""
    machine, grid = load_machine("dgx-h100"), GridShape(data=1024)
    link, message = machine.link(grid, "data"), sent_by_all_reduce(1024, 64 << 20)
    ring_s = 2 * (7 * 128 * 1.9e-6 + 127 * 4e-6 + 1e-6)  # 896 hops inside nodes, 127 between
    assert 2 * 1023 * link.latency_s == pytest.approx(ring_s, rel=0.01)
    sending = 2 * (64 << 20) / 360e9
    trees_s = 2 * (7 * 1.25e-6 + 7 * 8.5e-6)
    got = machine.collective_seconds(message, link, 1024)
    assert got == pytest.approx(sending / 0.92 + trees_s, rel=1e-6)
    assert got < 0.15 * ring_s  # the old plan's time was above ring_s

    large = sent_by_all_reduce(1024, 64 << 30)  # bandwidth matters most, and a ring has more
    ring = large.num_bytes / link.bytes_per_s + 2 * 1023 * link.latency_s
    assert machine.collective_seconds(large, link, 1024) == pytest.approx(ring)
    for kind in ("all_gather", "reduce_scatter"):  # NCCL has no trees for these
        half = Collective("data", kind, message.num_bytes // 2, "gradients")
        alone = half.num_bytes / link.bytes_per_s + 1023 * link.latency_s
        assert machine.collective_seconds(half, link, 1024) == pytest.approx(alone)


@pytest.mark.parametrize(
    ("inner", "size", "hops"),
    # inside and between nodes of 8: whole nodes, halves of nodes, single ranks, 3 nodes, one node
    [
        (1, 64, (7, 3)),
        (2, 64, (3, 4)),
        (8, 64, (0, 6)),
        (16, 4, (0, 2)),
        (1, 24, (7, 1)),
        (1, 8, None),
    ],
)
def test_trees_have_hops_inside_nodes_and_between(
    inner: int, size: int, hops: tuple[int, int] | None
) -> None:
    links = load_machine("dgx-a100").links
    found = links.of(inner, size, "data", 4096).trees_s
    if hops is None:
        assert found is None
    else:
        assert found == pytest.approx(2 * (hops[0] * 1.25e-6 + hops[1] * 8.5e-6))


def test_what_was_measured_of_all_reduces_is_not_changed_by_trees(tmp_path: Path) -> None:
    levels = """
tree_latency_s = 1e-6

[[levels]]
name = "cluster"
bytes_per_s = 1e9
latency_s = 1e-3
tree_latency_s = 1e-6
"""
    rows = """
[[levels.measured]]
inner = 1
size = 64
kind = "all_reduce"
bytes_per_s = 1e9
latency_s = 2e-3
"""
    grid, message = GridShape(data=64), sent_by_all_reduce(64, 6400)
    modelled, measured = (read(tmp_path, SMALL + levels + more) for more in ("", rows))
    ring = message.num_bytes / 1e9 + 2 * 63 * 2e-3
    assert measured.collective_seconds(message, measured.link(grid, "data"), 64) == (
        pytest.approx(ring)
    )
    assert modelled.collective_seconds(message, modelled.link(grid, "data"), 64) < 1e-3


def test_a_machine_may_have_an_end(tmp_path: Path) -> None:
    machine = read(tmp_path, SMALL)
    assert machine.max_ranks == 8
    with pytest.raises(PlannerError, match="machine 'mine' has 8 ranks, not 16"):
        machine.link(GridShape(x=4, data=4), "data")
    assert load_machine("perlmutter").max_ranks is None


# --- Arithmetic ----------------------------------------------------------------------------------


def test_products_have_tiles_and_waves(tmp_path: Path) -> None:
    units = "num_units = 10\ntiles = [[128, 256, 1.0]]\n[attention]"
    machine = read(tmp_path, SMALL.replace("[attention]", units).replace("1e-5", "0.0"))

    def seconds(tiles: int, k: int = 4096) -> float:
        return machine.matmul_seconds(Matmul(128 * tiles, 256, k, "NT"), "fp32")

    best = 2 * 128 * 256 * 4096 / (0.5e11 / 10)  # one tile on one unit
    assert seconds(10) == pytest.approx(best)
    assert seconds(11) == seconds(20) == pytest.approx(2 * best)
    # Five tiles are split into two along k, for ten units; three tiles into three, for nine.
    assert seconds(5) == pytest.approx(best / 2)
    assert seconds(3) == pytest.approx(best / 3)
    assert seconds(1, k=512) == pytest.approx(best / 8)  # too short for more parts
    ragged = machine.matmul_seconds(Matmul(128 * 10 - 100, 130, 4096, "NT"), "fp32")
    assert ragged == pytest.approx(best)


def test_parts_of_a_split_product_go_through_memory(tmp_path: Path) -> None:
    units = "num_units = 10\ntiles = [[2048, 2048, 1.0]]\n[attention]"
    text = SMALL.replace("[attention]", units).replace("launch_s = 1e-5", "")
    product, seconds = Matmul(2048, 2048, 10 * 512, "TN"), []
    for rate in ("1e12", "1e8"):
        machine = read(
            tmp_path, text.replace("memory_bytes_per_s = 1e10", f"memory_bytes_per_s = {rate}")
        )
        seconds.append(machine.matmul_seconds(product, "fp32"))
    assert seconds[0] == pytest.approx(product.flops / 0.5e11)
    assert seconds[1] == pytest.approx(10 * 2048**2 * 8 / 1e8)  # fp32, written and read


def test_products_that_memory_limits(tmp_path: Path) -> None:
    machine = read(tmp_path, SMALL)
    thin = Matmul(1, 4096, 4096, "NT")
    moved = 4 * (4096 + 4096**2 + 4096)
    assert machine.matmul_seconds(thin, "fp32") == pytest.approx(moved / 1e10 + 1e-5)
    thick = Matmul(4096, 4096, 4096, "NT")
    assert machine.matmul_seconds(thick, "fp32") == pytest.approx(thick.flops / 0.5e11 + 1e-5)


def test_measured_products_are_exact_and_correct_their_neighbours(tmp_path: Path) -> None:
    row = '[[matmul.measured]]\ndtype = "fp32"\nm = {0}\nn = 512\nk = 512\nlayout = "{1}"\n'
    rows = "".join(
        row.format(m, layout) + f"seconds = {seconds}\n"
        for m, layout, seconds in ((512, "NT", 0.01), (2048, "NT", 0.08), (512, "TN", 0.05))
    )
    machine, plain = (
        read(tmp_path, text) for text in (SMALL.replace("[attention]", rows + "[attention]"), SMALL)
    )

    def ratio(m: int, layout: str, k: int = 512) -> float:
        product = Matmul(m, 512, k, layout)
        return machine.matmul_seconds(product, "fp32") / plain.matmul_seconds(product, "fp32")

    assert machine.matmul_seconds(Matmul(512, 512, 512, "NT"), "fp32") == pytest.approx(0.01)
    assert machine.matmul_seconds(Matmul(2048, 512, 512, "NT"), "fp32") == pytest.approx(0.08)
    assert ratio(1024, "NT") == pytest.approx(math.sqrt(ratio(512, "NT") * ratio(2048, "NT")))
    assert ratio(512, "TN") == pytest.approx(5 * ratio(512, "NT"))
    # An unmeasured layout has the mean of the other layouts at the same sizes.
    assert ratio(512, "NN") == pytest.approx(math.sqrt(ratio(512, "NT") * ratio(512, "TN")))
    assert ratio(600, "NT") == pytest.approx(ratio(512, "NT"), rel=0.05)


def test_times_are_looked_up_once() -> None:
    machine, product = load_machine("dgx-h100"), Matmul(4096, 4096, 4096, "NT")
    assert machine.matmul_seconds(product, "bf16") == machine.matmul_seconds(product, "bf16")
    info = machine.products.seconds.cache_info()  # type: ignore[attr-defined]
    assert (info.misses, info.hits) == (1, 1)
    for _ in range(2):
        machine.link(GridShape(x=8, z=4), "z")
    assert machine.links.of.cache_info().hits == 1  # type: ignore[attr-defined]


def test_slowdown_is_of_arithmetic_alone() -> None:
    machine = dataclasses.replace(load_machine("perlmutter"), slowdown=1.0)
    twice = dataclasses.replace(machine, slowdown=2.0)
    product = Matmul(1000, 2000, 3000, "NN")
    assert twice.matmul_seconds(product, "bf16") == 2 * machine.matmul_seconds(product, "bf16")
    scores = Scores(10**12, 2048, 128)
    assert twice.attention_seconds(scores, "bf16") == 2 * machine.attention_seconds(scores, "bf16")
    assert twice.elementwise_seconds(10**9) == 2 * machine.elementwise_seconds(10**9)
    assert twice.link(GridShape(x=4), "x") == machine.link(GridShape(x=4), "x")
    none = Scores(0, 2048, 128)
    assert machine.attention_seconds(none, "bf16") == machine.elementwise_seconds(0) == 0


def test_attention_and_elementwise_work(tmp_path: Path) -> None:
    machine = read(tmp_path, SMALL)
    scores = Scores(2 * 10**10, 77, 13)
    assert machine.attention_seconds(scores, "fp32") == pytest.approx(1 + 1e-5)
    assert machine.elementwise_seconds(10**10) == pytest.approx(1 + 1e-5)
    assert machine.usable_bytes == 15 * 10**9


# --- Attention -----------------------------------------------------------------------------------

MEASURED_ATTENTION = """
[attention]
kernel = "new"

[[attention.measured]]
kernel = "old"
dtypes = ["fp32"]
sequence_lengths = [1024]
head_dims = [64]
flops = [[1e9]]

[[attention.measured]]
kernel = "new"
dtypes = ["fp32"]
sequence_lengths = [512, 2048]
head_dims = [64, 256]
flops = [[1e9, 4e9], [2e9, 8e9]]
"""


def test_attention_depends_on_sequences_and_heads(tmp_path: Path) -> None:
    machine = read(tmp_path, SMALL.replace("[attention]\nfp32 = 2e10\n", MEASURED_ATTENTION))
    rates = machine.attention
    for length, size, rate in (
        (512, 64, 1e9), (2048, 64, 4e9), (512, 256, 2e9), (2048, 256, 8e9),
        (1024, 64, 2e9), (1024, 128, 2e9 * 2**0.5),  # halfway on a logarithmic scale
        (1, 1, 1e9), (10**6, 10**4, 8e9),  # outside: the value at the nearest point
    ):  # fmt: skip
        assert rates.flops("fp32", length, size) == pytest.approx(rate)
    seconds = machine.attention_seconds(Scores(10**10, 2048, 64), "fp32")
    assert seconds == pytest.approx(2.5 + 1e-5)


def test_attention_of_the_machines_is_slower_for_short_sequences_and_small_heads() -> None:
    """With only a rate for 2,048 tokens, 512 tokens were too fast, and 16,384 too slow."""
    for name in ("dgx-a100", "dgx-h100", "perlmutter", "alps"):
        rates = load_machine(name).attention
        short, usual, long = (rates.flops("bf16", s, 128) for s in (512, 2048, 16384))
        assert short < 0.7 * usual < usual < 0.9 * long
        assert rates.flops("bf16", 2048, 64) < 0.95 * usual


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kernel = "new"\n\n', 'kernel = "newer"\n\n', "attention.kernel must be one of old, new"),
        ('kernel = "new"\n\n', "\n", "attention.kernel must be one of old, new; it is missing"),
        ('kernel = "new"\n\n', 'kernel = "new"\nfp32 = 1e9\n\n', "unknown key in attention 'fp32'"),
        ('["fp32"]', '["bf16"]', "attention.measured[0].dtypes must be an array of some of fp32"),
        ("[512, 2048]", "[2048, 512]", "sequence_lengths must be an array of ascending numbers"),
        ("[64, 256]", "[64, 0]", "head_dims must be an array of whole numbers >= 1, got [64, 0]"),
        ("[[1e9, 4e9], [2e9, 8e9]]", "[[1e9, 4e9]]", "flops must be an array of 2 arrays"),
        ("[[1e9, 4e9], [2e9, 8e9]]", "[[1e9], [2e9]]", "of 2 positive numbers, one for each of s"),
        ('kernel = "old"\n', 'kernel = "new"\n', "dtypes must be an array without fp32, whose"),
        ("8e9", "inf", "measured[1].flops must be an array of 2 arrays"),
        ('kernel = "new"\ndtypes', 'kernel = "old"\ndtypes', "attention.kernel must be one of old"),
    ],
)  # fmt: skip
def test_wrong_rates_of_attention_are_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = MEASURED_ATTENTION.replace(old, new)
    assert text != MEASURED_ATTENTION
    with pytest.raises(InputError, match=re.escape(message)):
        read(tmp_path, SMALL.replace("[attention]\nfp32 = 2e10\n", text))
