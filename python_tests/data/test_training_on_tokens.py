"""Training from token files: the same losses as from text, also after a resume; and memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from axonn_ext.cli.main import main
from axonn_ext.data import IndexedTokens, RandomWindows, ShuffledDocuments, TrainingBatches, whole
from axonn_ext.data.index_writer import IndexedWriter
from axonn_ext.spec.files.token_files import TokenFiles
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config import Config
from axonn_ext.train.config_file import Override, load_config
from axonn_ext.train.differences import differences
from axonn_ext.train.job import prepare
from commands import AXONN, run, small
from memory import MIB, anonymous_bytes
from token_files import write_token_files
from trained_here import train_here

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with 40 documents of about 2,000 bytes."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(40):
        content = f"document {index}: " + f"what it says is {index % 7}. " * (60 + index)
        (folder / f"{index:02}.txt").write_text(content)
    return folder


@pytest.fixture
def corpus(texts: Path) -> Path:
    """The same documents as token files."""
    out = texts.parent / "corpus"
    assert main(["tokenize", "--text", str(texts), "--out", str(out), "--workers", "1"]) == 0
    return out


def losses(folder: Path, **overrides: object) -> list[float]:
    return [step.loss for step in train_here(folder, data__max_bytes=0, **overrides).steps]


def test_documents_of_token_files_are_examples(texts: Path, tmp_path: Path) -> None:
    """They train like JSON lines with the same tokens, and `data.epochs` limits the steps."""
    lines = tmp_path / "lines.jsonl"
    with lines.open("w") as file:
        for text in sorted(texts.iterdir()):
            file.write(json.dumps({"text": text.read_text()}) + "\n")
    prefix = tmp_path / "stored"
    assert main(["tokenize", "--text", str(lines), "--out", str(prefix), "--workers", "1"]) == 0
    options = {"data__order": "examples", "train__steps": 3, "data__epochs": 1}
    of_text = losses(tmp_path / "a", data__text=lines, **options)
    assert losses(tmp_path / "b", data__text=prefix, **options) == of_text
    for changed, message in (
        ({"train__steps": 10**6}, r"train.steps: expected at most \d+, in which data.epochs 1 are"),
        ({"data__order": "windows"}, "data.epochs: expected 0 with data.order windows, got 1"),
    ):
        with pytest.raises(UserError, match=message):
            losses(tmp_path / "c", data__text=prefix, **options | changed)


@pytest.mark.parametrize("order", ["windows", "documents"])
def test_token_files_train_as_their_text_does(
    texts: Path, corpus: Path, tmp_path: Path, order: str
) -> None:
    of_text = losses(tmp_path / "a", data__text=texts, data__order=order)
    of_tokens = losses(tmp_path / "b", data__text=f"{corpus}.idx", data__order=order)
    assert of_tokens == of_text
    half = corpus.with_name("half")
    write_token_files(half, [[list((texts / "00.txt").read_bytes())]] * 4, "uint16")
    mixture = f"{corpus}=3,{half}=1"
    mixed = losses(tmp_path / "c", data__mixture=mixture, data__order=order, data__held_out=0.3)
    assert len(mixed) == len(of_text) and mixed != of_text


@pytest.mark.long
@pytest.mark.parametrize("order", ["windows", "documents"])
def test_a_resumed_run_reads_on(corpus: Path, tmp_path: Path, order: str) -> None:
    keys = {"data__text": corpus, "data__order": order, "train__eval_interval": 0}
    # An epoch has about 300 sequences, and each step 8: it ends after step 38.
    keys |= {"model__sequence_length": 256, "train__steps": 42}
    expected = losses(tmp_path / "whole", **keys)
    keys |= {"checkpoint__interval": 36, "checkpoint__background": False}
    losses(tmp_path / "first", **keys)
    keys |= {"checkpoint__resume": tmp_path / "first" / "checkpoints" / "step-00000036"}
    assert losses(tmp_path / "second", **keys) == expected[36:]


def test_what_differs_in_a_resumed_run_is_told() -> None:
    saved = dataclasses.asdict(Config())
    for key in ("order", "mixture"):
        del saved["data"][key]  # as saved by an older version
    assert list(differences(saved, dataclasses.asdict(Config()))) == []
    overrides = (Override("data.order", "documents"),)
    now = dataclasses.asdict(load_config(None, overrides=overrides))
    assert list(differences(saved, now)) == [
        "data.order was 'windows' in the run that is continued, now 'documents'"
    ]


@pytest.mark.slow
def test_two_ranks_and_the_command(corpus: Path, tmp_path: Path, capsys: Capture) -> None:
    alone = losses(tmp_path / "alone", data__text=corpus, data__order="documents")
    done = run(
        [*AXONN, "train", "--grid", "data=2", "--out", str(tmp_path / "two"),
         *small(data__text=corpus, data__order="documents", data__max_bytes=0)]
    )  # fmt: skip
    assert done.status == 0, done.output
    assert f"{corpus}: " in done.output and "40 documents, 256 tokens of bytes, shuffled" in (
        done.output
    )
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").open()]
    got = [line["loss"] for line in lines if "loss" in line]
    # Two ranks sum in another order: about 1e-7 of a loss in fp32, which training amplifies.
    np.testing.assert_allclose(got, alone, rtol=1e-4)


def refused(**overrides: object) -> str:
    pairs = tuple(Override(key.replace("__", "."), str(text)) for key, text in overrides.items())
    with pytest.raises(UserError) as caught:
        prepare(load_config(None, overrides=pairs), world_size=1)
    return str(caught.value)


def test_what_is_wrong_shows_before_training(corpus: Path, texts: Path, tmp_path: Path) -> None:
    write_token_files(tmp_path / "tiny", [[[1, 2, 3]]] * 3)
    known = {"model__vocab_size": 256}
    assert "data.text: the training text has 9 tokens, but one sequence with its" in refused(
        data__text=tmp_path / "tiny", **known
    )
    assert f"data.mixture: the held-out text (data.held_out) of {tmp_path}/tiny has 3 t" in refused(
        data__mixture=f"{corpus}=1,{tmp_path}/tiny=1", data__order="documents", **known
    )
    write_token_files(tmp_path / "one", [[[1] * 2000]])
    assert (
        "has 0 tokens, "
        in (text := refused(data__text=tmp_path / "one", data__order="documents", **known))
        and "it has one document, which is held out (data.held_out takes at least one" in text
    )
    assert "nothing says what the tokens of" in refused(data__text=tmp_path / "tiny")
    assert "data.text: expected a text or a mixture, got both" in refused(
        data__text=corpus, data__mixture=f"{corpus}=1"
    ).replace("data.mixture", "data.text")
    assert "data.mixture: expected PATH=WEIGHT" in refused(data__mixture=corpus)
    with Path(f"{corpus}.bin").open("ab") as stream:
        stream.write(b"x")
    assert f"data.text: {corpus}.bin is not whole" in refused(data__text=corpus)
    Path(f"{corpus}.idx").unlink()
    assert f"data.text: {corpus}.bin is half of a corpus" in refused(data__text=corpus)


def test_a_token_that_no_vocabulary_has_ends_the_run(tmp_path: Path) -> None:
    write_token_files(tmp_path / "odd", [[[7, 256] * 5000]])
    done = run(
        [*AXONN, "train", "--out", str(tmp_path / "run"),
         *small(data__text=tmp_path / "odd", model__vocab_size=256, data__max_bytes=0)]
    )  # fmt: skip
    assert done.status == 1
    assert f"error: data.text: {tmp_path}/odd.bin has token 256, near token number" in done.output
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """Draws from a corpus of 1 GB in 500,000 documents until it has read 100 MB.

    Besides the rows of a batch, which are freed, an epoch keeps 8 bytes per 1,024 documents, 4 KB.
    The limit of 4 MB allows for Python and numpy's pool of small arrays.
    """
    files = TokenFiles(tmp_path / "large")
    with IndexedWriter(files, np.dtype("<u2")) as writer:
        for index in range(500):
            tokens = np.random.default_rng(index).integers(0, 1000, 1_000_000).astype("<u2")
            writer.add(tokens, np.full(1000, 1000))
        writer.finish(
            {
                "vocabulary": "x",
                "vocabulary_size": 1000,
                "largest_token": 999,
                "tokens": 500_000_000,
            }
        )
    part = whole(IndexedTokens(files), vocab_size=1000)
    for order in (
        RandomWindows(part, sequence_length=1024, batch_size=16),
        ShuffledDocuments(part, sequence_length=1024),
    ):
        batches = TrainingBatches(order, batch_size=16)
        for step in range(100):
            batches.micro_batch(step, 0)
        before = anonymous_bytes()
        for step in range(100, 30_000, 10):
            batches.micro_batch(step, 0)
        assert anonymous_bytes() - before < 4 * MIB
