"""Tables of an epoch's order: computed once, read by later runs, recomputed if damaged."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from axonn_ext.data import ArrayTokens, ShuffledDocuments, whole
from axonn_ext.data.chunk_ends import Shelf, kept
from axonn_ext.data.index_writer import IndexedWriter
from axonn_ext.data.indexed import IndexedTokens
from axonn_ext.spec.files.token_files import TokenFiles
from limits import HANG_SECONDS

TABLE = np.array([3, 5, 9, 9], dtype=np.int64)


class Work:
    """Computes a table, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> np.ndarray:
        self.times += 1
        return TABLE


def test_a_table_is_computed_once(tmp_path: Path) -> None:
    work, shelf = Work(), Shelf(tmp_path / "a.orders", "1 2")
    for _ in range(3):
        assert kept(shelf, (0, 1), 4, work).tolist() == TABLE.tolist()
    assert work.times == 1
    for other in (shelf._replace(identity="1 3"), None):
        kept(other, (0, 1), 4, work)
    kept(shelf, (0, 2), 4, work)
    kept(shelf, (0, 1), 5, work)
    assert work.times == 5


@pytest.mark.parametrize("place", [0, 17, -1])
def test_a_damaged_table_is_replaced(tmp_path: Path, place: int) -> None:
    work, shelf = Work(), Shelf(tmp_path / "a.orders", "1 2")
    kept(shelf, (), 0, work)
    [file] = shelf.folder.iterdir()
    for content in (damaged(file.read_bytes(), place), file.read_bytes()[:-1], b""):
        before = work.times
        file.write_bytes(content)
        assert kept(shelf, (), 0, work).tolist() == TABLE.tolist()
        assert kept(shelf, (), 0, work).tolist() == TABLE.tolist()
        assert work.times == before + 1


def damaged(content: bytes, place: int) -> bytes:
    copy = bytearray(content)
    copy[place] ^= 4
    return bytes(copy)


def test_what_no_run_needs_any_more_is_removed(tmp_path: Path) -> None:
    work, shelf = Work(), Shelf(tmp_path / "a.orders", "1 2")
    for epoch in range(4):
        kept(shelf, "seed 0", epoch, work)
        kept(shelf, "seed 1", epoch, work)
    assert len([*shelf.folder.iterdir()]) == 4, "the last two epochs of both"
    kept(shelf._replace(identity="changed"), "seed 0", 9, work)
    assert len([*shelf.folder.iterdir()]) == 1


def test_a_table_that_cannot_be_kept_is_computed(tmp_path: Path) -> None:
    work = Work()
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "none" / "a.orders", tmp_path / "file"):
        for _ in range(2):
            assert kept(Shelf(folder, ""), (), 0, work).tolist() == TABLE.tolist()
    assert work.times == 4


def ask(shelf: Shelf, log: Path, seed: int) -> tuple[bool, list[int]]:
    """Gets the table at the same time as the other ranks; returns whether this rank computed it."""
    work = Work()

    def compute() -> np.ndarray:
        work()
        log.open("a").write("x")
        time.sleep(0.02)  # others would start meanwhile if they did not wait
        return np.random.default_rng(seed).integers(0, 1 << 62, 5000)

    dist.barrier()
    table = kept(shelf, seed, 1, compute)
    return bool(work.times), table.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_one_process_of_a_host_computes_a_table(pool, tmp_path: Path, seed: int) -> None:
    folders = {1: tmp_path / "a.orders", 4: tmp_path / "none" / "a.orders"}
    for times, folder in folders.items():
        log = tmp_path / f"{times}"
        answers = pool(4).run(ask, Shelf(folder, "1 2"), log, seed)
        assert sum(computed for computed, _ in answers) == len(log.read_text()) == times
        assert all(table == answers[0][1] for _, table in answers)
    assert [path.suffix for path in folders[1].iterdir()] == [".ends"]


ENDLESS = """
import sys, time
from pathlib import Path
from axonn_ext.data.chunk_ends import Shelf, kept

def compute():
    print("computes", flush=True)
    time.sleep(3600)

kept(Shelf(Path(sys.argv[1]), "1 2"), (), 0, compute)
"""


def test_the_table_of_a_process_that_is_killed_is_computed_by_those_that_wait(tmp_path) -> None:
    work, shelf = Work(), Shelf(tmp_path / "a.orders", "1 2")
    command = [sys.executable, "-c", ENDLESS, str(shelf.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "computes\n"
        with ThreadPoolExecutor() as threads:
            waiting = [threads.submit(kept, shelf, (), 0, work) for _ in range(2)]
            assert not any(each.done() for each in waiting) and not work.times
            holder.kill()
            for each in waiting:
                assert each.result(HANG_SECONDS).tolist() == TABLE.tolist()
    kept(shelf, (), 0, work)  # keeps it, unless one started after the holder's end
    before = work.times
    assert kept(shelf, (), 0, work).tolist() == TABLE.tolist() and work.times == before


def test_a_file_system_without_locks_keeps_tables(tmp_path: Path, monkeypatch) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    work, shelf = Work(), Shelf(tmp_path / "a.orders", "1 2")
    for _ in range(3):
        assert kept(shelf, (), 0, work).tolist() == TABLE.tolist()
    assert work.times == 1


def test_epochs_of_token_files_are_read_from_their_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("axonn_ext.data.orders.KEPT_FROM", 5000)
    files, random = TokenFiles(tmp_path / "corpus"), np.random.default_rng(0)
    lengths = random.integers(1, 9, 5000)
    with IndexedWriter(files, np.dtype("<u2")) as writer:
        data = random.integers(0, 999, lengths.sum()).astype("<u2")
        writer.add(data, lengths)
        writer.finish({})

    class Counted(IndexedTokens):
        looked_up = 0

        def starts(self, documents: np.ndarray) -> np.ndarray:
            self.looked_up += len(documents)
            return super().starts(documents)

    read, looked_up = [], []
    for _ in range(2):
        tokens = Counted(files)
        order = ShuffledDocuments(whole(tokens), sequence_length=16, seed=3)
        per_epoch = order.sequences_per_epoch
        read.append([order.sequences(place, 4) for place in (0, per_epoch - 2, per_epoch + 7)])
        looked_up.append(tokens.looked_up)
    assert all(map(np.array_equal, *read))
    assert looked_up[0] - looked_up[1] == 2 * 2 * 5000, "two epochs, both ends of each document"
    assert len([*(tmp_path / "corpus.orders").iterdir()]) == 2
    of_files, in_memory = (
        ShuffledDocuments(whole(tokens), sequence_length=16, seed=4).sequences(0, 4)
        for tokens in (IndexedTokens(files), ArrayTokens(data, lengths))
    )
    assert np.array_equal(of_files, in_memory), "another seed has tables of its own"
