"""The documents of the experiment: reading, distribution to buckets, and errors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from axonn_ext.data import (
    ByteVocabulary,
    PackedBatches,
    open_tokens,
    open_vocabulary,
    stored_examples,
)
from axonn_ext.data.corpus import find_source
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.token_files import TokenFiles
from axonn_ext.train.memorization.documents import (
    CONTINUED,
    Document,
    deal,
    read_documents,
    refuse_overlap,
    write_documents,
)
from axonn_ext.train.memorization.experiment import Exposures, Settings, all_repetitions
from axonn_ext.train.memorization.generated_text import TextGenerator
from chat_cases import write_tokenizer

SETTINGS = Settings(
    models=("32x1",), trains_on=False, repetitions=(0, 1, 3), per_bucket=4, documents="",
    background="", background_size=30, vocabulary="", sequence_length=96, batch_size=4, lr=1e-3,
    seed=5, goldfish_k=4, goldfish_h=13, goldfish_window="before",
)  # fmt: skip


def document(first: int, length: int = 60, repetitions: int | None = None) -> Document:
    return Document(tuple(range(first, first + length)), repetitions, f"document {first}")


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_documents_are_cut_and_short_ones_left_out(tmp_path) -> None:
    path = write(
        tmp_path / "a.jsonl", {"text": "a" * 300}, {"text": "b" * CONTINUED},
        {"tokens": [*range(51)], "repetitions": 4},
    )  # fmt: skip
    found, num_short = read_documents(path, encode, most_tokens=200)
    assert [len(each.tokens) for each in found] == [200, 51]
    assert (num_short, found[1].repetitions) == (1, 4)
    assert found[1].prompt == (0,)
    assert found[1].continuation == tuple(range(1, 51))
    assert len(found[0].prompt) == 150
    write_documents(tmp_path / "b.jsonl", found)
    again, _ = read_documents(tmp_path / "b.jsonl", encode)
    assert [(d.tokens, d.repetitions) for d in again] == [(d.tokens, d.repetitions) for d in found]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "short"}, "expected documents of more than 50 tokens"),
        ({"words": "x"}, "line 1: expected a text, or tokens as a list of whole numbers >= 0"),
        ({"text": "x", "tokens": [1]}, "line 1: expected a text, or tokens"),
        ({"tokens": [1, -1]}, "line 1: expected a text, or tokens"),
        ({"tokens": [True]}, "line 1: expected a text, or tokens"),
        ({"text": "x", "repetitions": -1}, "repetitions: expected a whole number >= 0, got -1"),
        ({"text": "x", "repetitions": "4"}, "repetitions: expected a whole number >= 0, got '4'"),
        ([1], "line 1: expected an object"),
    ],
)
def test_lines_that_are_no_documents(tmp_path, line, message) -> None:
    path = write(tmp_path / "a.jsonl", line)
    with pytest.raises(InputError) as error:
        read_documents(path, encode)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_files_that_are_none(tmp_path) -> None:
    with pytest.raises(InputError, match=r"expected a file of JSON lines, .* ends in \.jsonl"):
        read_documents(tmp_path / "a.txt", encode)
    with pytest.raises(InputError, match=r"cannot read .*No such file"):
        read_documents(tmp_path / "a.jsonl", encode)


def test_documents_are_dealt_in_turn_or_stay_in_their_buckets() -> None:
    plain = [document(number) for number in range(7)]
    dealt = deal(plain, (0, 2, 9))
    assert [(d.repetitions, d.tokens[0]) for d in dealt] == [
        (0, 0), (0, 3), (0, 6), (2, 1), (2, 4), (9, 2), (9, 5)
    ]  # fmt: skip
    assert len(deal(plain, (0, 2, 9), each=1)) == 3
    said = [document(number, repetitions=(4, 0, 7)[number % 3]) for number in range(6)]
    assert [(d.repetitions, d.tokens[0]) for d in deal(said, (0, 4))] == [
        (0, 1), (0, 4), (4, 0), (4, 3)
    ]  # fmt: skip


def test_buckets_that_are_empty_or_overlap() -> None:
    with pytest.raises(
        InputError, match=r"the bucket of 6 repetitions is empty: .* 4 buckets, got"
    ):
        deal([document(number) for number in range(3)], (0, 1, 4, 6))
    with pytest.raises(InputError, match="the bucket of 1 repetitions is empty"):
        deal([document(1, repetitions=0)], (0, 1))
    with pytest.raises(InputError, match="document 1: expected repetitions, as other documents"):
        deal([document(1), document(2, repetitions=4)], (0, 4))
    other = Document(document(1).tokens, 4, "the same elsewhere")
    with pytest.raises(InputError, match=r"elsewhere: buckets overlap, .* that of document 1"):
        deal([document(1, repetitions=0), other], (0, 4))


def test_documents_of_the_background() -> None:
    documents = [document(1), document(100, 80)]
    refuse_overlap(
        documents, [document(2).tokens, document(1, 61).tokens, document(100, 79).tokens]
    )
    for same in (document(1).tokens, document(100, 90).tokens):
        with pytest.raises(InputError, match=r"document 1.*: this document is in the background"):
            refuse_overlap(documents, [document(5).tokens, same])


@pytest.mark.parametrize("numbers", [[0], [1, 2], [0, 4, 4], [0, 6, 1], []])
def test_repetitions_that_cannot_be(numbers) -> None:
    with pytest.raises(ValueError, match="expected 0, which is the control, and then larger"):
        all_repetitions(numbers)
    assert all_repetitions([0, 1, 9]) == (0, 1, 9)


def test_generated_text_is_the_same_everywhere() -> None:
    documents = TextGenerator(3).documents(200, 60, 120)
    assert {60, 120} <= {len(text) for text in documents} <= set(range(60, 121))
    assert len(set(documents)) == len(documents)
    assert documents != TextGenerator(4).documents(200, 60, 120)
    text = "\n".join(documents)
    assert text.isascii()
    # The digest of the text with which the figures of docs/memorization.md were measured.
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "0aea74a2419b3d06"
    words = Counter(text.split())
    assert words.most_common(1)[0][1] > 100
    assert sum(count == 1 for count in words.values()) > 100


def test_each_document_is_stored_as_often_as_it_is_seen(tmp_path) -> None:
    exposures = Exposures.of(SETTINGS, ByteVocabulary())
    files = TokenFiles(tmp_path / "training")
    exposures.write(files, ByteVocabulary())
    source = find_source(str(tmp_path / "training"))
    examples = stored_examples(
        open_tokens(source), sequence_length=96, vocab_size=256, held_out=exposures.held_out
    )
    assert examples.num_cut == 0
    # The trainer's steps read each example exactly once.
    steps = exposures.num_steps(batch_size=4, seed=5)
    batches = PackedBatches(examples.train, sequence_length=96, batch_size=4, seed=5, epochs=1)
    seen: Counter[tuple[int, ...]] = Counter()
    for step in range(steps):
        tokens, labels, documents = batches.micro_batch(step, 0)
        assert batches.num_labels(step) == int((labels != -100).sum()) > 0
        for row in range(4):
            for number in documents[row].unique().tolist():
                mine = (documents[row] == number) & (labels[row] != -100)
                if mine.any():
                    first = tokens[row][mine][:1].tolist()
                    seen[(*first, *labels[row][mine].tolist())] += 1
    counts = {d.tokens: d.repetitions for d in exposures.documents}
    assert Counter(counts.values()) == {0: 4, 1: 4, 3: 4}
    for tokens, wanted in counts.items():
        assert seen[tokens] == wanted
    assert sum(seen.values()) == 4 + 12 + len(exposures.background)
    assert [tuple(e.tokens.tolist()) for e in examples.held_out] == [*exposures.validation]
    assert not set(exposures.validation) & set(seen)


def test_a_background_of_the_users(tmp_path) -> None:
    texts = TextGenerator(8).documents(9, 150, 150)
    path = write(tmp_path / "b.jsonl", *({"text": text} for text in texts))
    settings = Settings(**(vars(SETTINGS) | {"background": str(path), "background_size": 0}))
    exposures = Exposures.of(settings, ByteVocabulary())
    # Consecutive pieces share a token, so that every token is a label.
    joined = [exposures.background[n] + exposures.background[n + 1][1:] for n in range(0, 16, 2)]
    assert [bytes(tokens).decode() for tokens in joined] == texts[:8]
    assert b"".join(map(bytes, exposures.validation))[:97] == texts[8].encode()[:97]
    control = [d for d in exposures.documents if d.repetitions == 0]
    write(path, {"text": texts[0]}, {"text": bytes(control[0].tokens).decode()})
    with pytest.raises(
        InputError, match="generated document 0: this document is in the background"
    ):
        Exposures.of(settings, ByteVocabulary())
    write(path, {"text": texts[0]})
    with pytest.raises(InputError, match="expected at least two documents as a background"):
        Exposures.of(settings, ByteVocabulary())
    none = Settings(**(vars(SETTINGS) | {"background_size": 0}))
    alone = Exposures.of(none, ByteVocabulary())
    assert alone.background == ()
    assert alone.validation == tuple(d.tokens for d in alone.documents if d.repetitions == 0)


def test_a_tokenizer_that_adds_tokens_hides_no_overlap(tmp_path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = write_tokenizer(tmp_path / "own", "mistral", back="</s>") / "tokenizer.json"
    vocabulary = open_vocabulary(str(tokenizer))
    texts = TextGenerator(8).documents(5, 300, 300)
    documents = write(tmp_path / "d.jsonl", *({"text": text} for text in texts[:3]))
    background = write(tmp_path / "b.jsonl", *({"text": text} for text in texts[2:]))
    changed = {"documents": str(documents), "background": str(background), "background_size": 0}
    settings = dataclasses.replace(SETTINGS, **changed)
    with pytest.raises(InputError, match="line 3: this document is in the background"):
        Exposures.of(settings, vocabulary)
    write(background, *({"text": text} for text in texts[3:]))
    exposures = Exposures.of(settings, vocabulary)
    begins = {tokens[0] for tokens in (exposures.background[0], exposures.documents[0].tokens)}
    assert begins == {vocabulary.find("<s>")}
    ends = [exposures.validation[-1][-1], *(d.tokens[-1] for d in exposures.documents)]
    assert vocabulary.find("</s>") not in ends


def test_settings_that_differ_are_named(tmp_path) -> None:
    read = {"32x1": "0aea74a2"}
    SETTINGS.save(tmp_path / "a.json", read)
    SETTINGS.check_saved(tmp_path / "a.json", read)
    other = Settings(**(vars(SETTINGS) | {"seed": 6}))
    with pytest.raises(InputError, match=r"a.json: the experiment to continue has seed 5, not 6"):
        other.check_saved(tmp_path / "a.json", read)
    with pytest.raises(InputError, match=r"a.json: the documents, .* are no longer those"):
        SETTINGS.check_saved(tmp_path / "a.json", {"32x1": "6602d4bb"})


def test_a_digest_of_what_is_read() -> None:
    first = Exposures.of(SETTINGS, ByteVocabulary())
    assert first.sha256 == Exposures.of(SETTINGS, ByteVocabulary()).sha256
    moved = (*first.background[1:], *first.validation)
    one = first.documents[-1]
    changed = Document(tokens=one.tokens, repetitions=4, where=one.where)
    others = [
        dataclasses.replace(first, background=first.background[1:]),
        dataclasses.replace(first, background=moved, validation=first.background[:1]),
        dataclasses.replace(first, documents=(*first.documents[:-1], changed)),
    ]
    assert len({first.sha256, *(other.sha256 for other in others)}) == 4


def test_tokens_that_the_vocabulary_lacks(tmp_path) -> None:
    for number in (256, 2**70):
        lines = [{"tokens": [number, *range(start, start + 60)]} for start in range(3)]
        path = write(tmp_path / "a.jsonl", *lines)
        settings = dataclasses.replace(SETTINGS, documents=str(path))
        with pytest.raises(
            ValueError, match=rf"line 1: token ids must be in \[0, 256\), got 0 to {number}"
        ):
            Exposures.of(settings, ByteVocabulary())
