"""`axonn-ext tokenize`: the same bytes with any number of processes; its error messages."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from axonn_ext.cli.main import main
from axonn_ext.cli.tokenize import _ending_as_interrupted
from axonn_ext.data import open_vocabulary, units
from axonn_ext.data.processes import ordered_results
from axonn_ext.data.units import UNIT_BYTES, Piece, find_units, pieces, read_unit
from commands import AXONN, run, start, wait_until
from limits import HANG_SECONDS
from token_files import read_token_files

Capture = pytest.CaptureFixture[str]
WORDS = ("def", "return", "self", "None", "the", "of", "and", "to\n\n", " ", "x", "=", "1\n\t")


def prose(num_bytes: int, *, seed: int = 0) -> str:
    """Text with blank lines, indentation and repeated words."""
    text, state = [], seed
    while num_bytes > 0:
        state = (state * 1103515245 + 12345) % 2**31
        text.append(WORDS[state // 65536 % len(WORDS)] + ("\n" if state % 11 == 0 else " "))
        num_bytes -= len(text[-1])
    return "".join(text)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 300 tokens; token 0 ends a document."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator([prose(20_000)], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "bpe.json"
    made.save(str(path))
    return path


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes units of 1,000 bytes in this process, so that small texts have many."""
    monkeypatch.setattr(units, "UNIT_BYTES", 1000)
    return 1000


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of documents: small and large files, JSON lines, an empty one, odd bytes."""
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text(prose(700))
    (folder / "b" / "big.txt").write_text(prose(7300, seed=1))
    (folder / "c.jsonl").write_text(
        "".join(json.dumps({"n": n, "text": prose(n * 40, seed=n)}) + "\n" for n in range(40))
        + "\n" + json.dumps({"text": "d\u00e9j\u00e0 \ud800 " + prose(2500)})
    )  # fmt: skip
    (folder / "d.txt").write_text("")
    (folder / "e.txt").write_bytes(bytes(range(128)) + "\u00e9\u6f22".encode())
    (folder / ".hidden").write_text("no")
    return folder


def documents_of(folder: Path) -> list[bytes]:
    """The nonempty documents, read in the simplest way."""
    found = [folder / name for name in ("a.txt", "b/big.txt", "c.jsonl", "d.txt", "e.txt")]
    documents = []
    for path in found:
        if path.suffix == ".jsonl":
            lines = [line for line in path.read_text().splitlines() if line]
            documents += [json.loads(line)["text"].encode(errors="replace") for line in lines]
        else:
            documents.append(path.read_bytes())
    return [document for document in documents if document]


def tokenize(text: Path, out: Path, *arguments: object) -> list[list[int]]:
    """Runs the command in this process; returns the tokens that it wrote."""
    command = ["tokenize", "--text", str(text), "--out", str(out), *map(str, arguments)]
    assert main(command) == 0
    return read_token_files(out)


# --- What is written -----------------------------------------------------------------------------


@pytest.mark.usefixtures("small_units")
def test_documents_of_bytes(texts: Path, tmp_path: Path) -> None:
    expected = [list(document) for document in documents_of(texts)]
    assert tokenize(texts, tmp_path / "out", "--workers", 1) == expected
    about = json.loads((tmp_path / "out.json").read_text())
    assert about == {
        "format": 1, "vocabulary": "bytes", "vocabulary_size": 256, "vocabulary_sha256": None,
        "append_id": None, "largest_token": 0xE6, "documents": len(expected),
        "tokens": sum(map(len, expected)),
        "text_bytes": sum(path.stat().st_size for path in texts.rglob("*.[tj]*")),
    }  # fmt: skip


@pytest.mark.usefixtures("small_units")
def test_documents_of_a_tokenizer(texts: Path, tmp_path: Path, tokenizer: Path) -> None:
    """Long documents are split only where that changes no token."""
    import tokenizers

    plain = tokenizers.Tokenizer.from_file(str(tokenizer))
    expected = [
        [*plain.encode(document.decode(errors="replace")).ids, 0]
        for document in documents_of(texts)
    ]
    arguments = ("--vocabulary", tokenizer, "--append-id", 0, "--workers", 1)
    assert tokenize(texts, tmp_path / "out", *arguments) == expected
    vocabulary = open_vocabulary(str(tokenizer))
    for document, tokens in zip(documents_of(texts), expected, strict=True):
        assert [*vocabulary.encode(document).tolist(), 0] == tokens


@pytest.mark.parametrize(
    "vocabulary",
    [
        pytest.param("bytes", marks=pytest.mark.slow),
        pytest.param("bpe.json", marks=pytest.mark.long),
    ],
)
def test_any_number_of_processes_writes_the_same(
    tmp_path: Path, tokenizer: Path, vocabulary: str
) -> None:
    """A text of two units, and JSON lines; five times as much for bytes, which are fast."""
    bpe = vocabulary != "bytes"
    some = prose(20_000) * (UNIT_BYTES // 19_000 * (1 if bpe else 5))
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "big.txt").write_text(some)
    lines = [json.dumps({"text": some[n : n + (9_000 if bpe else 900_000)]}) for n in range(30)]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    written = []
    for workers in (1, 2) if bpe else (1, 2, 7):
        out = tmp_path / f"out{workers}"
        arguments = ("--vocabulary", tokenizer if bpe else vocabulary, "--append-id", 0)
        assert len(tokenize(folder, out, *arguments, "--workers", workers)) == 31
        written.append([Path(f"{out}.{ending}").read_bytes() for ending in ("bin", "idx", "json")])
    assert all(each == written[0] for each in written)


def test_another_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "ab", "text": 1}\r\n \n{"body": "c"}')
    got = tokenize(tmp_path / "a.jsonl", tmp_path / "out", "--field", "body", "--workers", 1)
    assert got == [list(b"ab"), list(b"c")]


@pytest.mark.parametrize(
    "content", [b"", b"x" * 5000, b"a\nb\n" * 800, b" \n\n" * 900, b"ab c d" * 600]
)
def test_stretches_of_a_text_are_its_pieces(
    small_units: int, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "text"
    for text in (
        content,
        b"y" * (small_units - 1) + b"\n" + content,
        content + b"\n\xd1\x8f" * 500,
    ):
        path.write_bytes(text)
        read = [piece for unit in find_units([path], "text") for piece in read_unit(unit)]
        assert [piece.text for piece in read] == list(pieces(text))
        assert b"".join(pieces(text)) == text
        assert [piece.begins for piece in read] == [True] + [False] * (len(read) - 1)
        assert [piece.ends for piece in read] == [False] * (len(read) - 1) + [True]


def test_each_line_belongs_to_one_stretch(small_units: int, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for length in (1, 30, 100, small_units - 13, small_units - 12, 5 * small_units):
        lines = [json.dumps({"text": f"{n % 10}" * length}) for n in range(30)]
        for end in ("", "\n"):
            path.write_text("\n".join(lines) + end)
            read = [piece for unit in find_units([path], "text") for piece in read_unit(unit)]
            assert b"".join(p.text for p in read) == b"".join(
                b"%d" % (n % 10) * length for n in range(30)
            )
            assert sum(piece.ends for piece in read) == 30
    assert Piece(b"") == Piece(b"", begins=True, ends=True)


# --- Processes -----------------------------------------------------------------------------------


def _square() -> object:
    return lambda number: number * number


def _fragile() -> object:
    def work(number: int) -> int:
        if number == 3:
            time.sleep(0.3)  # so that others finish first
            raise ValueError("three")
        if number == 5:
            raise ValueError("five")
        return number

    return work


def _dies() -> object:
    return lambda number: os.kill(os.getpid(), signal.SIGKILL)


def test_results_come_in_order() -> None:
    assert list(ordered_results(_square, range(50), processes=3)) == [n * n for n in range(50)]
    assert list(ordered_results(_square, range(3), processes=1)) == [0, 1, 4]


def test_the_first_error_in_the_order_is_raised() -> None:
    got = []
    with pytest.raises(ValueError, match="three"):
        for number in ordered_results(_fragile, range(9), processes=2):
            got.append(number)
    assert got == [0, 1, 2]


def test_a_process_that_dies_is_told() -> None:
    with pytest.raises(ChildProcessError, match="has ended by signal 9; if memory has run out"):
        list(ordered_results(_dies, range(3), processes=2))


# --- Mistakes ------------------------------------------------------------------------------------


def refusal(capsys: Capture, *arguments: object) -> str:
    assert main(["tokenize", *map(str, arguments)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name enclosed in double quotes"),
        ("[1]", "expected an object"),
        ('{"body": 1, "b": 2}', "expected a field text, got body, b"),
        ('{"text": 7}', "expected text in the field text"),
        ('{"text": "\udcff"}', "codec can't decode byte 0xff"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, capsys: Capture, line: str, reason: str, workers: int
) -> None:
    path = tmp_path / "lines.jsonl"
    good = '{"text": "good"}\n'
    path.write_bytes(f"{good * 4000}\n{line}\n{good}".encode(errors="surrogateescape"))
    text = refusal(capsys, "--text", tmp_path, "--out", tmp_path / "out", "--workers", workers)
    assert f"{path}, line 4,002: " in text and reason in text
    assert "; it begins " in text
    assert os.listdir(tmp_path) == ["lines.jsonl"]


def test_mistakes(texts: Path, tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("tokenizers")
    out = ("--out", tmp_path / "out")
    fine = ("--text", texts, *out)
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "old.idx").write_text("old")
    for arguments, expected in (
        (("--text", tmp_path / "no", *out), f"{tmp_path / 'no'} does not exist"),
        (("--text", tmp_path / "empty", *out), f"{tmp_path / 'empty'} is empty"),
        ((*fine, "--vocabulary", "no.json"), 'expected "bytes" or a tokenizers JSON file, but no.'),
        ((*fine, "--vocabulary", texts / "a.txt"), "is not a tokenizers JSON file"),
        ((*fine, "--append-id", 256), "append_id must be a token of bytes, 0 to 255, got 256"),
        ((*fine, "--append-id", -1), "--append-id: expected a whole number >= 0, got -1"),
        ((*fine, "--workers", 0), "--workers: expected a whole number >= 1, got 0"),
        ((*fine, "--what"), "unknown argument --what"),
        (("--text", texts, "--out", tmp_path / "no" / "out"), f"there is no folder {tmp_path}/no"),
        (("--text", texts, "--out", tmp_path / "folder"), "folder exists, so that --data.text"),
        (("--text", texts, "--out", tmp_path / "old"), "old.idx exists; --overwrite replaces it"),
        (("--text", texts, "--out", "/"), "expected a PREFIX of names of files, got /"),
        (("--text", texts, "--out", "/proc/out"), "--out: cannot write /proc/out.bin"),
    ):
        assert expected in refusal(capsys, *arguments), arguments
    assert (tmp_path / "old.idx").read_text() == "old"
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("before", [10, 4000])
def test_bytes_that_are_no_utf8(
    small_units: int, tmp_path: Path, tokenizer: Path, capsys: Capture, before: int
) -> None:
    path = tmp_path / "text"
    content = ("d\u00e9 " * before).encode() + b"\xff" + b" and" * 900
    path.write_bytes(content)
    command = ("--text", path, "--out", tmp_path / "out", "--workers", 1)
    text = refusal(capsys, *command, "--vocabulary", tokenizer)
    assert f"{path} is not UTF-8 text: byte {4 * before:,} is 0xff; only the voc" in text
    assert tokenize(path, tmp_path / "out", "--workers", 1) == [list(content)]
    (tmp_path / "corpus.json").write_text('{"text": "a"}\n')
    text = refusal(capsys, "--text", tmp_path / "corpus.json", "--out", tmp_path / "b")
    assert "corpus.json would be read as one text: expected JSON lines, in a file" in text


def test_overwriting(texts: Path, tmp_path: Path, capsys: Capture) -> None:
    tokenize(texts, tmp_path / "out", "--workers", 1)
    before = (tmp_path / "out.idx").read_bytes()
    assert "out.bin exists" in refusal(capsys, "--text", texts, "--out", tmp_path / "out")
    got = tokenize(texts / "a.txt", tmp_path / "out", "--overwrite", "--workers", 1)
    assert len(got) == 1 and (tmp_path / "out.idx").read_bytes() != before
    bin_file = tmp_path / "out.bin"
    text = refusal(capsys, "--text", bin_file, "--out", tmp_path / "out", "--overwrite")
    assert "out.bin belongs to --text" in text


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_leaves_nothing(
    tmp_path: Path, tokenizer: Path, number: signal.Signals
) -> None:
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": prose(3_000_000)}) + "\n")
    for _ in range(5):  # 96 MB, which takes a minute
        content = (tmp_path / "text.jsonl").read_bytes()
        (tmp_path / "text.jsonl").write_bytes(content + content)
    (tmp_path / "out").mkdir()
    process = start(
        [*AXONN, "tokenize", "--text", str(tmp_path / "text.jsonl"), "--workers", "2",
         "--vocabulary", str(tokenizer), "--out", str(tmp_path / "out" / "corpus")],
        output=tmp_path / "log",
    )  # fmt: skip
    wait_until(lambda: bool(list((tmp_path / "out").glob(".corpus.bin*"))), "the first files")
    time.sleep(0.5)
    os.killpg(process.pid, number)  # a terminal sends SIGINT to the whole group
    assert process.wait(timeout=HANG_SECONDS) == 130
    assert list((tmp_path / "out").iterdir()) == []
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_signal_that_nohup_ignores_stays_ignored(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        with _ending_as_interrupted():
            assert (signal.getsignal(signal.SIGHUP) == handler) == (handler is signal.SIG_IGN)
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_progress_without_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(prose(40_000) * (9 * UNIT_BYTES // 40_000))
    done = run([*AXONN, "tokenize", "--text", str(tmp_path / "text"), "--out", str(tmp_path / "o")])
    assert done.status == 0, done.output
    lines = done.output.splitlines()
    assert 3 <= len(lines) <= 11
    assert all(" MB/s, " in line and line.endswith(" s left") for line in lines[:-2])
    assert lines[-2].startswith("1 documents, 37,7")
    assert lines[-1] == f"written: {tmp_path}/o.bin, {tmp_path}/o.idx, {tmp_path}/o.json"


def test_help_needs_no_torch() -> None:
    code = (
        "import sys, axonn_ext.cli.main, axonn_ext.cli.tokenize, axonn_ext.data.tokenizing; "
        "assert 'torch' not in sys.modules"
    )
    assert run([sys.executable, "-c", code]).status == 0
