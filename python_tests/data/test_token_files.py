"""Token files in the formats of Megatron and `datasets`: read back exactly, or refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from axonn_ext.data import (
    CorpusOptions,
    IndexedTokens,
    StoredVocabulary,
    Tokens,
    find_sources,
    load_corpus,
    open_tokens,
    split,
    text_bytes,
    vocabulary_of,
)
from axonn_ext.data.examples import stored_examples
from axonn_ext.data.index_writer import IndexedWriter, dtype_for
from axonn_ext.spec.files.token_files import TokenFiles
from token_files import CODES, read_token_files, write_token_files

DOCUMENTS = [[[1, 2, 3], [4]], [], [[5] * 70], [[], [6, 7]], [[100]]]  # documents of sequences
FLAT = [[token for sequence in document for token in sequence] for document in DOCUMENTS]
STREAM = [token for document in FLAT for token in document]


def documents_of(tokens: Tokens) -> list[list[int]]:
    starts = tokens.starts(np.arange(tokens.num_documents + 1))
    return [tokens.read(a, b - a).tolist() for a, b in pairwise(starts)]


def opened(path: Path | str) -> Tokens:
    [source] = find_sources(str(path))
    return open_tokens(source)


@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("dtype", list(CODES))
def test_what_megatron_writes_is_read_token_for_token(
    tmp_path: Path, dtype: str, modes: bool
) -> None:
    write_token_files(tmp_path / "corpus", DOCUMENTS, dtype, modes=modes)
    for name in ("corpus", "corpus.bin", "corpus.idx"):
        tokens = opened(tmp_path / name)
        assert documents_of(tokens) == FLAT
        assert tokens.num_documents == len(DOCUMENTS)
        assert tokens.read(0, tokens.num_tokens).tolist() == STREAM
        backwards = np.array([4, 0, 2, 5, 1])
        assert tokens.starts(backwards).tolist() == [76, 0, 4, 77, 4]


@pytest.mark.parametrize(
    ("num_tokens", "dtype"),
    [(256, "uint8"), (257, "uint16"), (65499, "uint16"), (65500, "int32"), (200_000, "int32")],
)
def test_what_is_written_is_read_by_others(tmp_path: Path, num_tokens: int, dtype: str) -> None:
    assert dtype_for(num_tokens) == np.dtype(dtype)
    written = [[0, 1, num_tokens - 1], [5], [7] * 300]
    files = TokenFiles(tmp_path / "corpus")
    with IndexedWriter(files, dtype_for(num_tokens)) as writer:
        writer.add(np.array(written[0] + written[1]), np.array([3]))
        writer.add(np.array([], dtype=np.int64), np.array([1]))
        writer.add(np.array(written[2]), np.array([300]))
        writer.finish({"vocabulary": "x", "vocabulary_size": 3, "largest_token": 2, "tokens": 304})
    assert read_token_files(files.prefix) == written
    assert documents_of(opened(files.prefix)) == written
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "corpus.bin", "corpus.idx", "corpus.json"
    ]  # fmt: skip


def test_nothing_is_left_of_what_was_not_finished(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        with IndexedWriter(TokenFiles(tmp_path / "corpus"), np.dtype("u1")) as writer:
            writer.add(np.zeros(10), np.array([10]))
            assert len(list(tmp_path.iterdir())) == 2
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def write_one(files: TokenFiles, token: int) -> None:
    with IndexedWriter(files, np.dtype("u1")) as writer:
        writer.add(np.full(3, token), np.array([3]))
        writer.finish({"about": token})


@pytest.mark.parametrize("failing", range(6))
def test_old_files_come_back_if_a_name_cannot_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    files = TokenFiles(tmp_path / "corpus")
    write_one(files, 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    replace, calls = os.replace, iter(range(100))

    def fails(source: Path, target: Path) -> None:
        if next(calls) == failing:
            raise PermissionError(13, "Permission denied")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(PermissionError):
        write_one(files, 2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write_one(files, 2)
    assert documents_of(opened(files.prefix)) == [[2, 2, 2]]
    assert len(list(tmp_path.iterdir())) == 3


def test_names_are_given_without_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        replace(source, target)

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(os, "replace", interrupted)
    write_one(TokenFiles(tmp_path / "corpus"), 1)
    assert documents_of(opened(tmp_path / "corpus")) == [[1, 1, 1]]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_remains_of_killed_processes_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    host = socket.gethostname()
    removed = [f".corpus.bin.{host}.{gone.pid}.tmp", f".corpus.idx.{host}.{gone.pid}.len"]
    kept = [
        f".corpus.bin.{host}.{os.getppid()}.tmp", f".corpus.bin.other-{host}.{gone.pid}.tmp",
        f".corpus.bin.{host}.{gone.pid}.old", f".corpus2.bin.{host}.{gone.pid}.tmp",
    ]  # fmt: skip
    for name in removed + kept:
        (tmp_path / name).touch()
    write_one(TokenFiles(tmp_path / "corpus"), 1)
    left = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("."))
    assert left == sorted(kept)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_token_files(tmp_path / "corpus", DOCUMENTS)
    return tmp_path / "corpus"


@pytest.mark.parametrize(("ending", "by"), [("bin", -1), ("bin", 1), ("idx", -1), ("idx", 3)])
def test_files_that_are_cut_off_are_named(prefix: Path, ending: str, by: int) -> None:
    file = Path(f"{prefix}.{ending}")
    size = file.stat().st_size
    os.truncate(file, size + by)
    with pytest.raises(ValueError, match=rf"corpus\.{ending} is not whole.*expected {size:,} b"):
        opened(prefix)


@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (0, b"PK", "is not a token index: expected its first bytes to be MMIDIDX"),
        (9, b"\x02", "expected version 1 .* got version 2"),
        (17, b"\x07", r"whole numbers as tokens .* got version 1 and code 7 \(floats\)"),
        (17, b"\x09", r"got version 1 and code 9 \(unknown\)"),
        (26, b"\x00", "expected at least one index of a document, got none"),
        (34 + 12 * 6, b"\x01", "expected indices of documents from 0 to 6, .* got 1 and 6"),
    ],
)
def test_an_index_of_another_kind_is_named(
    prefix: Path, offset: int, content: bytes, message: str
) -> None:
    file = Path(f"{prefix}.idx")
    index = bytearray(file.read_bytes())
    index[offset : offset + len(content)] = content
    file.write_bytes(index)
    with pytest.raises(ValueError, match=rf"corpus\.idx.*{message}"):
        opened(prefix)


def rewrite(prefix: Path, kind: str, offset: int, number: int) -> None:
    index = bytearray(Path(f"{prefix}.idx").read_bytes())
    struct.pack_into(kind, index, offset, number)
    Path(f"{prefix}.idx").write_bytes(index)


def test_sequences_that_do_not_follow_each_other_are_named(tmp_path: Path) -> None:
    """Megatron would read 5 and 10 tokens; the .bin has 5 other tokens in between."""
    write_token_files(tmp_path / "corpus", [[[1] * 10], [[2] * 10], [[3] * 3]], "uint16")
    rewrite(tmp_path / "corpus", "<i", 34, 5)
    tokens = opened(tmp_path / "corpus")
    assert tokens.read(10, 13).tolist() == [2] * 10 + [3] * 3
    for start, count in ((0, 1), (0, 23), (9, 2)):
        with pytest.raises(
            ValueError, match=r"idx: expected .* sequence 0 is at the bytes 0 to 10"
        ):
            tokens.read(start, count)


def test_documents_that_begin_before_the_ones_before_them_are_named(tmp_path: Path) -> None:
    documents = [[[number] * 4] for number in range(5)]
    write_token_files(tmp_path / "corpus", documents, "uint16")
    rewrite(tmp_path / "corpus", "<q", 34 + 12 * 5 + 8 * 2, 4)  # 0, 1, 4, 3, 4, 5
    tokens = opened(tmp_path / "corpus")
    with pytest.raises(
        ValueError, match="document 2 begins with sequence 4, and the one after it with 3"
    ):
        tokens.starts(np.arange(6))
    with pytest.raises(ValueError, match="document 2 begins with sequence 4"):
        stored_examples(tokens, sequence_length=8, vocab_size=8, held_out=0)


@pytest.mark.parametrize("first", [-1, 7])
def test_documents_of_no_sequence_are_named(prefix: Path, first: int) -> None:
    rewrite(prefix, "<q", 34 + 12 * 6 + 8, first)
    tokens = opened(prefix)
    with pytest.raises(
        ValueError, match=rf"idx is damaged: document 1 begins with sequence {first}"
    ):
        tokens.starts(np.arange(3))


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_half_of_a_corpus_is_no_text(prefix: Path, ending: str) -> None:
    Path(f"{prefix}.{ending}").unlink()
    other = {"bin": "idx", "idx": "bin"}[ending]
    for name in (prefix, f"{prefix}.{other}"):
        with pytest.raises(ValueError, match=rf"corpus\.{other} is half of a corpus: .*{ending} d"):
            find_sources(str(name))


def test_a_file_that_becomes_shorter_is_named(prefix: Path) -> None:
    tokens = opened(prefix)
    os.truncate(f"{prefix}.bin", 100)
    with pytest.raises(ValueError, match=r"corpus\.bin has become shorter: byte 100 is missing"):
        tokens.read(0, tokens.num_tokens)


def test_a_corpus_without_documents(tmp_path: Path) -> None:
    write_token_files(tmp_path / "none", [])
    tokens = opened(tmp_path / "none")
    assert (tokens.num_documents, tokens.num_tokens, documents_of(tokens)) == (0, 0, [])
    for by_documents in (False, True):
        for part in split(tokens, 0.1, by_documents=by_documents):
            assert (part.count, part.num_documents) == (0, 0)


def test_descriptors_are_closed(prefix: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        IndexedTokens(TokenFiles(prefix))
    assert len(os.listdir("/proc/self/fd")) <= before + 1


# --- Vocabularies --------------------------------------------------------------------------------


def describe(prefix: Path, **changes: object) -> None:
    about = {
        "format": 1, "vocabulary": "mine.json", "vocabulary_size": 300, "vocabulary_sha256": "ab",
        "largest_token": 100, "tokens": 77,
    }  # fmt: skip
    Path(f"{prefix}.json").write_text(json.dumps(about | changes))


def test_token_files_say_their_vocabulary(prefix: Path) -> None:
    describe(prefix)
    sources = find_sources(str(prefix))
    assert vocabulary_of(sources, "bytes") == StoredVocabulary("mine.json", 300, "ab")
    describe(prefix, tokens=78)
    with pytest.raises(ValueError, match=r"corpus\.json describes 78 tokens, but .*bin has 77"):
        open_tokens(sources[0])
    describe(prefix, vocabulary_size="many")
    with pytest.raises(ValueError, match=r"corpus\.json: vocabulary_size must be a whole number"):
        vocabulary_of(sources, "bytes")


@pytest.mark.parametrize(
    "content",
    [b"print(1)\n", b"[1]", b'{"vocabulary": 3}', b"\xff", b'{"format": 1}' + b" " * 2**20],
)
def test_descriptions_of_somebody_else_are_not_read(prefix: Path, content: bytes) -> None:
    Path(f"{prefix}.json").write_bytes(content)
    assert vocabulary_of(find_sources(str(prefix)), "bytes", vocab_size=9).num_tokens == 9
    assert opened(prefix).num_tokens == 77
    describe(prefix, format=2)
    with pytest.raises(ValueError, match=r"corpus\.json: format must be 1, which .*, got 2"):
        opened(prefix)


def test_tokens_of_which_nothing_is_known(prefix: Path) -> None:
    sources = find_sources(str(prefix))
    with pytest.raises(ValueError, match=r"data\.vocabulary, or .* in model\.vocab_size"):
        vocabulary_of(sources, "bytes")
    assert vocabulary_of(sources, "bytes", vocab_size=512).num_tokens == 512


def test_vocabularies_that_differ(prefix: Path, tmp_path: Path) -> None:
    describe(prefix)
    write_token_files(tmp_path / "other", DOCUMENTS)
    describe(tmp_path / "other", vocabulary="b", vocabulary_sha256="cd")
    (tmp_path / "text").write_text("words")
    both = find_sources("", f"{prefix}=1,{tmp_path / 'other'}=1")
    with pytest.raises(ValueError, match=r"corpus are those of mine\.json, but .*other are of b"):
        vocabulary_of(both, "bytes")
    with_text = find_sources("", f"{prefix}=1,{tmp_path / 'text'}=1")
    with pytest.raises(ValueError, match=r"corpus are those of mine\.json, not of bytes"):
        vocabulary_of(with_text, "bytes")


def test_sources_that_cannot_be(prefix: Path) -> None:
    with pytest.raises(ValueError, match="expected a text or a mixture, got both"):
        find_sources(str(prefix), f"{prefix}=1")
    with pytest.raises(ValueError, match=r"weight 0\.0001 of .* is less than one of 1024"):
        find_sources("", f"{prefix}=1,{prefix}=0.0001")


def test_json_lines_are_no_documents_of_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "b"}\n' * 10)
    sources = find_sources(str(tmp_path / "a.jsonl"))
    vocabulary = vocabulary_of(sources, "bytes")
    assert not isinstance(vocabulary, StoredVocabulary)
    for order in ("documents", "windows"):
        with pytest.raises(ValueError, match="axonn-ext tokenize --text "):
            load_corpus(sources, vocabulary, CorpusOptions(order=order))
    with pytest.raises(ValueError, match="axonn-ext tokenize --text "):
        text_bytes(str(tmp_path))


# --- Arrow ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The output of save_to_disk: two files with several record batches."""
    pytest.importorskip("pyarrow")
    yield write_arrow(tmp_path / "arrow", [[FLAT[:2], FLAT[2:3]], [FLAT[3:]]])


def write_arrow(folder: Path, files: list[list[list[list[int]]]], kind: str = "int32") -> Path:
    import pyarrow

    folder.mkdir()
    names = [f"data-{index:05}-of-{len(files):05}.arrow" for index in range(len(files))]
    schema = pyarrow.schema(
        [("id", pyarrow.int64()), ("input_ids", pyarrow.list_(getattr(pyarrow, kind)()))]
    )
    for name, batches in zip(names, files, strict=True):
        with pyarrow.OSFile(str(folder / name), "wb") as sink:
            with pyarrow.ipc.new_stream(sink, schema) as stream:
                for rows in batches:
                    columns = [list(range(len(rows))), rows]
                    stream.write_batch(pyarrow.record_batch(columns, schema=schema))
    state = {"_data_files": [{"filename": name} for name in names], "_indices_files": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_arrow_folders_are_read_token_for_token(folder: Path, tmp_path: Path) -> None:
    tokens = opened(folder)
    assert documents_of(tokens) == FLAT
    for start in range(tokens.num_tokens - 4):  # across batches and files
        assert tokens.read(start, 5).tolist() == STREAM[start : start + 5]
    assert tokens.starts(np.array([4, 0, 2, 5, 1])).tolist() == [76, 0, 4, 77, 4]
    assert tokens.starts(np.array([], dtype=np.int64)).tolist() == []
    assert documents_of(opened(write_arrow(tmp_path / "b", [[FLAT]], kind="int64"))) == FLAT


def test_a_folder_of_datasets_itself(tmp_path: Path) -> None:
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    rows = {"input_ids": [[index] * (index % 7) for index in range(2500)]}
    made = datasets.Dataset(pyarrow.table(rows), fingerprint="axonn")
    made.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    assert documents_of(opened(tmp_path / "saved")) == rows["input_ids"]


def test_arrow_folders_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text("{}")
    with pytest.raises(ValueError, match=r"dict has several data sets .*dict/train"):
        find_sources(str(tmp_path / "dict"))
    file = folder / "data-00001-of-00002.arrow"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"cannot read .*data-00001-of-00002\.arrow: "):
        opened(folder)
    file.unlink()
    with pytest.raises(ValueError, match=r"cannot read .*data-00001-of-00002\.arrow: "):
        opened(folder)
    (folder / "state.json").write_text("[]")
    with pytest.raises(ValueError, match=r"state\.json: expected a list _data_files"):
        opened(folder)


def test_arrow_columns_that_are_no_tokens(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    for number, (name, column, message) in enumerate(
        (
            ("text", ["a"], r"expected a column input_ids, got text"),
            ("input_ids", [1], r"expected lists of whole numbers in input_ids, got int64"),
            ("input_ids", [[1.5]], r"expected lists of whole numbers in input_ids, got list"),
            ("input_ids", [[1], None], r"expected a list of tokens in each row of input_ids"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        table = pyarrow.table({name: column})
        with pyarrow.ipc.new_stream(str(folder / "a.arrow"), table.schema) as stream:
            stream.write_table(table)
        (folder / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
        (folder / "dataset_info.json").write_text("{}")
        with pytest.raises(ValueError, match=message):
            opened(folder)


def test_pyarrow_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(ValueError, match=r"pip install 'axonn-ext\[arrow\]'"):
        opened(tmp_path)
