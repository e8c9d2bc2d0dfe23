"""Hosts in network order, and the axes that stay inside a host."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from torch.distributed import HashStore

from axonn_ext.ranks.launch.order import NATURAL, in_rank_order, natural, order_of, read_order
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.terminal import describe_hosts
from commands import ROOT, environment, small
from limits import HANG_SECONDS


def test_numbers_in_names_count_as_numbers() -> None:
    names = [f"gpu{n}" for n in range(1, 121)]
    shuffled = random.Random(0).sample(names, len(names))
    assert sorted(shuffled, key=natural) == names
    assert sorted(["rack2n1", "rack10n1", "a", "rack2n10", "2"], key=natural) == [
        "2", "a", "rack2n1", "rack2n10", "rack10n1",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_hosts_of_one_part_are_neighbours_and_host_0_is_first(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    parts = [f"spine{s}/leaf{n}" for s in range(draw.randint(1, 3)) for n in range(1, 12, 3)]
    part_of = {f"gpu{n}": draw.choice(parts) for n in range(draw.randint(1, 40))}
    file = tmp_path / "order"
    file.write_text("".join(f"{host} {part}\n" for host, part in part_of.items()))
    hosts = draw.sample(list(part_of), draw.randint(1, len(part_of)))
    order = order_of(read_order(file, [f"{host}.cluster" for host in hosts]))
    assert order[0] == 0 and sorted(order) == list(range(len(hosts)))
    for depth in (1, 2):
        found = [tuple(part_of[hosts[i]].split("/")[:depth]) for i in order]
        changes = sum(a != b for a, b in pairwise(found))
        assert changes == len(set(found)) - 1


def test_a_list_is_a_ring_from_host_0_on(tmp_path: Path) -> None:
    (tmp_path / "order").write_text("# racks\nd\nb  # broken switch\n\na\nc\n")
    hosts = ["a", "b", "c", "d"]
    assert order_of(read_order(tmp_path / "order", hosts)) == [0, 2, 3, 1]  # a, c, d, b


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n", r"order: expected a line for each host, got none for b"),
        ("a\nb\na\n", r"order:3: expected a host not yet listed, got 'a'"),
        ("a 1 2\nb\n", r"order:1: expected HOST or HOST PART/PART, got 'a 1 2'"),
        ("a 1\nb\n", r"order: expected as many parts for each host, got 0 and 1"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "order").write_text(text)
    with pytest.raises(UserError, match=rf"--rank-order .*{message}"):
        read_order(tmp_path / "order", ["a", "b"])


@pytest.mark.parametrize(
    ("rank_order", "ranks"),
    # natural order of the hosts 1, 2 and 10; the file's order
    [(NATURAL, [0, 1, 4, 5, 2, 3, 6, 7]), ("order", [0, 1, 2, 3, 6, 7, 4, 5])],
)
def test_all_ranks_find_their_place(tmp_path: Path, rank_order: str, ranks: list[int]) -> None:
    hosts, store = ["gpu1", "gpu10", "gpu2", "gpu11"], HashStore()
    (tmp_path / "order").write_text("gpu11 b\ngpu2 b\ngpu1 a\ngpu10 a\n")
    asked = rank_order if rank_order == NATURAL else str(tmp_path / rank_order)

    def place(rank: int) -> Process:
        return in_rank_order(store, Process(rank, 8, 2), asked, host=hosts[rank // 2])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(place, range(8))) == [Process(rank, 8, 2) for rank in ranks]


AS_HOST = """
import socket, sys
host = sys.argv.pop(1)
socket.gethostname = lambda: host
from axonn_ext.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
def test_errors_have_the_rank_of_the_job(tmp_path: Path) -> None:
    """The second of three hosts becomes the last; only that host lacks the text."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    (tmp_path / "text").write_text("some text " * 1000)
    ranks = []
    for rank, (host, text) in enumerate((("a1", "text"), ("a10", "none"), ("a2", "text"))):
        place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        options = small(data__text=tmp_path / text, train__batch_size=9)
        command = ["train", "--rank-order", NATURAL, "--grid", "data=3", *options]
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", AS_HOST, host, *command, "--out", str(tmp_path / "out")],
                env=environment() | place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, cwd=ROOT,
            )
        )  # fmt: skip
    try:
        first, last, middle = (rank.communicate(timeout=HANG_SECONDS)[0] for rank in ranks)
    finally:
        for each in ranks:
            each.kill()
    assert last.startswith("[rank 2] error: ") and str(tmp_path / "none") in last, last
    told = "error: stopping, because of the mistake that rank 2 reports"
    assert [first, middle] == [f"[rank 0] {told}\n", f"[rank 1] {told}\n"]


@pytest.mark.parametrize(
    ("grid", "ranks_of_host", "inside"),
    [
        (GridShape(x=8), 8, ["x"]), (GridShape(x=8, data=2), 8, ["x"]),
        (GridShape(x=2, y=2, z=2, data=2), 8, ["x", "y", "z"]), (GridShape(x=4, data=3), 6, []),
        (GridShape(x=6, y=2), 6, ["x"]), (GridShape(x=3, y=2, data=2), 6, ["x", "y"]),
        (GridShape(x=8, y=9, data=2), 72, ["x", "y"]), (GridShape(x=16, data=9), 72, []),
        (GridShape(x=2, y=2), 8, ["x", "y"]), (GridShape(z=4, data=4), 8, ["z"]),
        (GridShape(x=2, pipe=4), 4, ["x"]),
    ],
)  # fmt: skip
def test_axes_inside_a_host(grid: GridShape, ranks_of_host: int, inside: list[str]) -> None:
    assert grid.inside(ranks_of_host) == inside
    for axis, size in grid.as_dict().items():  # compared with the actual groups
        stride = grid.inner(axis)
        firsts = [r for r in range(grid.size) if r // stride % size == 0]
        hosts = [{(r + i * stride) // ranks_of_host for i in range(size)} for r in firsts]
        if size > 1:
            assert (axis in inside) == all(len(of_group) == 1 for of_group in hosts)


def test_a_run_says_that_x_leaves_the_host() -> None:
    assert describe_hosts(GridShape(x=4), 4) == ""
    stays = describe_hosts(GridShape(x=3, data=4), 6)
    assert stays.endswith("inside a host: x; across hosts: data")
    text = describe_hosts(GridShape(x=4, data=3), 6)
    assert text.startswith("2 with 6 ranks each; inside a host: no axis; across hosts: x, data")
    assert "warning: x=4 " in text and text.endswith("with a size of 1, 2, 3, 6")
