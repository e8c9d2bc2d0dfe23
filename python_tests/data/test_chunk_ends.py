"""Tables of an epoch's order: computed once, read by later runs, never read when they are wrong."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from axonn_ext.data import ShuffledDocuments, whole
from axonn_ext.data.chunk_ends import Shelf, kept
from axonn_ext.data.index_writer import IndexedWriter
from axonn_ext.data.indexed import IndexedTokens
from axonn_ext.inputs.token_files import TokenFiles

TABLE = np.array([3, 5, 9, 9], dtype=np.int64)


class Work:
    """Counts how often a table is computed."""

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


def test_one_process_writes_and_a_dead_one_is_forgotten(tmp_path: Path) -> None:
    work, shelf = Work(), Shelf(tmp_path / "a.orders", "1 2")
    kept(shelf, (), 0, work)
    [file] = shelf.folder.iterdir()
    file.rename(partial := file.with_suffix(".partial"))
    kept(shelf, (), 0, work)
    assert not file.exists() and partial.exists()
    os.utime(partial, (0, 0))
    kept(shelf, (), 0, work)
    assert file.exists() and not partial.exists()


def test_epochs_of_token_files_are_read_from_their_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("axonn_ext.data.orders.KEPT_FROM", 5000)
    files, random = TokenFiles(tmp_path / "corpus"), np.random.default_rng(0)
    lengths = random.integers(1, 9, 5000)
    with IndexedWriter(files, np.dtype("<u2")) as writer:
        writer.add(random.integers(0, 999, lengths.sum()).astype("<u2"), lengths)
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
