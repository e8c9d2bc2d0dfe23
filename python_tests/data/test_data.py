"""Text, vocabulary and batches: the same global batch on every grid, resumable by step."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from axonn_ext.data import (
    ArrayTokens,
    ByteVocabulary,
    Corpus,
    CorpusOptions,
    EvaluationBatches,
    RandomWindows,
    RowGroup,
    TrainingBatches,
    Vocabulary,
    find_sources,
    find_text,
    load_corpus,
    open_vocabulary,
    padded_size,
    python_sources,
    split,
    text_bytes,
    whole,
)
from axonn_ext.spec.files.digests import WHOLE, sampled

TOKENS = np.arange(5000, dtype=np.int32)  # token i at position i, so windows show their position


def training(
    *, group: RowGroup | None = None, num_micro_batches: int = 1, seed: int = 0
) -> TrainingBatches:
    order = RandomWindows(whole(ArrayTokens(TOKENS)), sequence_length=7, batch_size=24, seed=seed)
    return TrainingBatches(order, batch_size=24, num_micro_batches=num_micro_batches, group=group)


def text_corpus(path: str, vocabulary: Vocabulary, *, max_bytes: int = 0) -> Corpus:
    options = CorpusOptions(held_out=0, max_bytes=max_bytes)
    return load_corpus(find_sources(path), vocabulary, options)


def tokens_of(corpus: Corpus) -> list[int]:
    [source] = corpus.sources
    return source.train.read(0, source.train.count).tolist()


def global_batch(step: int, *, num_micro_batches: int, num_groups: int) -> Tensor:
    """The batch of a step, assembled from all row groups' parts of all micro-batches."""
    groups = [
        training(group=RowGroup(index, num_groups), num_micro_batches=num_micro_batches)
        for index in range(num_groups)
    ]
    return torch.cat(
        [
            group.micro_batch(step, index)[0]
            for index in range(num_micro_batches)
            for group in groups
        ]
    )


def test_python_sources_are_sorted_library_files() -> None:
    files = python_sources()
    assert len(files) > 200
    assert files == sorted(files)
    assert all(file.suffix == ".py" for file in files)
    assert not any({"site-packages", "test"} & set(file.parts[-4:-1]) for file in files)


def test_folder_is_read_sorted_and_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in (("c.txt", b"3"), ("b/x", b"2"), ("a.txt", b"1"), (".git/z", b"no")):
        (tmp_path / name).write_bytes(content)
    assert [file.name for file in find_text(str(tmp_path))] == ["a.txt", "x", "c.txt"]
    corpus = text_corpus(str(tmp_path), ByteVocabulary())
    assert bytes(tokens_of(corpus)) == b"123"
    assert (corpus.num_documents, corpus.num_bytes) == (3, 3)


def test_any_bytes_are_text_and_the_limit_ends_the_reading(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4
    (tmp_path / "text").write_bytes(content)
    path = str(tmp_path / "text")
    corpus = text_corpus(path, ByteVocabulary(), max_bytes=1000)
    assert bytes(tokens_of(corpus)) == content[:1000]
    assert text_bytes(path) == 1024
    assert text_bytes(path, max_bytes=1000) == 1000


def test_text_for_a_tokenizer_is_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Words(ByteVocabulary):
        """A vocabulary other than bytes."""

    monkeypatch.setattr("axonn_ext.data.corpus.ByteVocabulary", int)
    path = tmp_path / "text"
    path.write_bytes("d\u00e9j\u00e0".encode())
    for limit in (0, 2, 3):  # 2 is in the middle of a character
        assert len(tokens_of(text_corpus(str(path), Words(), max_bytes=limit))) == (limit or 6)
    for content, place in ((b"abc\xff", 3), (b"ab\xc3", 2)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"text is not UTF-8 text: byte {place} is 0x"):
            text_corpus(str(path), Words())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a.json", r"JSON lines, .* ends in \.jsonl \(Megatron's \.json files"),
        ("a.jsonl.GZ", "what is packed in it"),
        ("a.zst", "what is packed in it"),
        ("a.parquet", "JSON lines, in a file"),
    ],
)
def test_other_formats_are_no_text(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / name).write_text("b")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(
            ValueError, match=rf"{name} would be read as one text: expected {reason}"
        ):
            find_text(str(path))


def test_default_text_has_a_limit() -> None:
    assert text_bytes("") == 8_000_000
    assert text_bytes("", max_bytes=1234) == 1234


@pytest.mark.parametrize("read", [text_bytes, lambda path: text_corpus(path, ByteVocabulary())])
def test_missing_and_empty_text_are_named(tmp_path: Path, read: object) -> None:
    assert callable(read)
    with pytest.raises(ValueError, match=r"nowhere does not exist"):
        read(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"holds none"):
        read(str(tmp_path))
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"empty is empty"):
        read(str(tmp_path / "empty"))


def test_held_out_is_the_end() -> None:
    train, held_out = split(ArrayTokens(TOKENS), 0.1, by_documents=False)
    assert train.read(0, train.count).tolist() == list(range(4500))
    assert held_out.read(0, held_out.count).tolist() == list(range(4500, 5000))
    assert split(ArrayTokens(TOKENS), 0, by_documents=False)[1].count == 0


def test_labels_are_the_next_tokens() -> None:
    token_ids, labels, _ = training().micro_batch(3, 0)
    assert token_ids.shape == labels.shape == (24, 7)
    assert token_ids.dtype == labels.dtype == torch.int64
    torch.testing.assert_close(labels, token_ids + 1, rtol=0, atol=0)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
def test_global_batch_is_the_same_for_all_groups_and_micro_batches(num_micro_batches: int) -> None:
    whole = training().micro_batch(5, 0)[0]
    for num_groups in (1, 2, 4):
        got = global_batch(5, num_micro_batches=num_micro_batches, num_groups=num_groups)
        torch.testing.assert_close(got, whole, rtol=0, atol=0)


def test_a_step_needs_no_other_step() -> None:
    after_others = training()
    for step in range(9):
        after_others.micro_batch(step, 0)
    torch.testing.assert_close(after_others.micro_batch(9, 0), training().micro_batch(9, 0))


def test_steps_seeds_and_sequences_differ() -> None:
    def starts(step: int, seed: int = 0) -> list[int]:
        return training(seed=seed).micro_batch(step, 0)[0][:, 0].tolist()

    assert starts(0) != starts(1)
    assert starts(0) != starts(0, seed=1)
    drawn = [start for step in range(40) for start in starts(step)]
    assert len(set(drawn)) > 0.85 * len(drawn)  # 960 of 4993 positions: 9 % repeat by chance
    assert abs(np.mean(drawn) - 2496) < 200  # uniform: standard error 47
    assert 0 <= min(drawn) < 60
    assert 4930 < max(drawn) <= 4992


def test_draws_are_fixed() -> None:
    """A resumed run must read the same text with a later version of this package."""
    assert training().micro_batch(0, 0)[0][:4, 0].tolist() == [3031, 1234, 2002, 3965]


def test_a_digest_is_of_all_or_of_parts_from_the_first_unit_to_the_last() -> None:
    counts = np.random.default_rng(2).integers(1, 2**40, 20).tolist()
    for count in (*counts, WHOLE, WHOLE + 1):
        parts = list(sampled(count))
        ends = [start + length for start, length in parts]
        assert parts[0][0] == 0 and ends[-1] == count and sorted(ends) == ends
        assert sum(length for _, length in parts) == (count if count <= WHOLE else 64 * 65536)


def test_shortest_text() -> None:
    shortest = whole(ArrayTokens(TOKENS[:8]))
    batches = TrainingBatches(
        RandomWindows(shortest, sequence_length=7, batch_size=2), batch_size=2
    )
    assert batches.micro_batch(0, 0)[1].tolist() == [list(range(1, 8))] * 2
    with pytest.raises(ValueError, match=r"training text has 7 tokens.* needs 8"):
        RandomWindows(whole(ArrayTokens(TOKENS[:7])), sequence_length=7, batch_size=2)


def test_batch_must_divide() -> None:
    with pytest.raises(ValueError, match=r"24 must be divisible by 5 micro-batches"):
        training(num_micro_batches=5)
    with pytest.raises(ValueError, match=r"6 sequences must be divisible by the 4"):
        training(num_micro_batches=4, group=RowGroup(0, 4))


def test_evaluation_covers_the_text_evenly_and_never_changes() -> None:
    parts = [whole(ArrayTokens(TOKENS))]
    batches = EvaluationBatches(parts, sequence_length=7, batch_size=6, num_batches=2)
    windows = torch.cat([batches.batch(i)[0] for i in range(2)])
    assert windows[:, 0].tolist() == [i * 4992 // 11 for i in range(12)]
    assert windows[-1, -1] == 4998  # its label is the last token
    assert batches.num_labels == 84
    halves = [
        EvaluationBatches(
            parts, sequence_length=7, batch_size=6, num_batches=2, group=RowGroup(i, 2)
        ).batch(1)[0]
        for i in range(2)
    ]
    torch.testing.assert_close(torch.cat(halves), windows[6:])


def test_byte_vocabulary_round_trip() -> None:
    vocabulary = open_vocabulary("bytes")
    ids = vocabulary.encode("d\u00e9j\u00e0".encode())
    assert vocabulary.num_tokens == 256
    assert vocabulary.decode(ids.tolist()) == "d\u00e9j\u00e0"


@pytest.mark.parametrize(("tokens", "padded"), [(256, 256), (1, 128), (50257, 50304)])
def test_vocabulary_is_padded_so_that_grids_divide_it(tokens: int, padded: int) -> None:
    assert padded_size(tokens) == padded


def test_tokenizers_file(tmp_path: Path) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "text").write_text("a b b c")
    vocabulary = open_vocabulary(str(tmp_path / "words.json"))
    corpus = text_corpus(str(tmp_path / "text"), vocabulary)
    assert vocabulary.num_tokens == 3
    assert tokens_of(corpus) == [0, 1, 1, 2]
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizers JSON file"):
        open_vocabulary(str(tmp_path / "broken.json"))
    with pytest.raises(ValueError, match=r'expected "bytes" or a tokenizers JSON file'):
        open_vocabulary(str(tmp_path / "none.json"))


def test_tokenizers_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # imports fail as if it were not installed
    with pytest.raises(ValueError, match="pip install tokenizers"):
        open_vocabulary("words.json")
