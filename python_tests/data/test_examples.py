"""Examples for fine-tuning: reading, learned tokens, and packing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from axonn_ext.data import (
    ArrayTokens,
    ByteVocabulary,
    EvaluationBatches,
    PackedBatches,
    PackedEvaluation,
    Prompts,
    RandomWindows,
    RowGroup,
    ShuffledDocuments,
    load_examples,
    stored_examples,
    whole,
)
from axonn_ext.data.examples import Example, Skipped, pack
from axonn_ext.nn import Places
from axonn_ext.spec.goldfish import Goldfish
from goldfish_cases import labels_of

END = 0
LENGTH = 24


def write(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def load(path: str, **options):
    end_id = options.pop("end_id", END)
    return load_examples(path, bytes_ending_in(end_id), **({"sequence_length": LENGTH} | options))


def bytes_ending_in(end_id: int | None) -> Prompts:
    with tempfile.TemporaryDirectory() as folder:
        if end_id is not None:
            (Path(folder) / "config.json").write_text(json.dumps({"eos_token_id": end_id}))
        return Prompts(ByteVocabulary(), model=Path(folder))


@pytest.mark.parametrize("end", ["", chr(END)])
def test_only_completions_are_learned(end: str, tmp_path) -> None:
    """Each example ends in exactly one END, which is learned, even if the text has it already."""
    lines = {"prompt": "ab", "completion": "cde" + end}, {"text": "xyz" + end}
    path = write(tmp_path / "a.jsonl", *lines)
    examples = load(path, held_out=0)
    assert [bytes(e.tokens.tolist()) for e in examples.train] == [b"abcde\0", b"xyz\0"]
    batch = PackedBatches(examples.train, sequence_length=LENGTH, batch_size=1).micro_batch(0, 0)
    pairs: dict[int, list[tuple[int, int]]] = {}
    for token, label, document in zip(*(t[0].tolist() for t in batch), strict=True):
        if label != -100:
            pairs.setdefault(document, []).append((token, label))
    learned = {"".join(chr(label) for _, label in each) for each in pairs.values()}
    assert learned == {"cde\0", "yz\0"}
    # Each label is predicted from the token before it.
    assert [(chr(a), chr(b)) for a, b in pairs[1] + pairs[2]].count(("b", "c")) == 1


def random_examples(count: int, seed: int = 0) -> list[Example]:
    """Examples whose tokens all differ, so that each can be found."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(2, LENGTH + 2, count)
    starts = np.concatenate([[1], 1 + np.cumsum(lengths)])
    return [
        Example(
            np.arange(first, first + length), np.arange(length) >= generator.integers(0, length)
        )
        for first, length in zip(starts.tolist(), lengths.tolist(), strict=False)
    ]


def test_every_example_is_there_once_an_epoch() -> None:
    examples = random_examples(50)
    batches = PackedBatches(examples, sequence_length=LENGTH, batch_size=1, seed=3)
    orders = []
    for epoch in range(2):
        begin = batches.num_sequences(epoch)
        seen = []
        for step in range(begin, batches.num_sequences(epoch + 1)):
            batch = batches.micro_batch(step, 0)
            found = [t[0] for t in batch]
            for document in range(1, int(found[2].max()) + 1):
                here = found[2] == document
                seen.append((found[0][here].tolist(), found[1][here].tolist()))
            assert (found[1][found[2] == 0] == -100).all(), "what is left has labels"
        orders.append([tokens[0] for tokens, _ in seen])
        want = [
            (
                e.tokens[:-1].tolist(),
                np.where(e.learned, e.tokens, -100)[1:].tolist(),
            )
            for e in examples
        ]
        assert sorted(seen) == want
    assert orders[0] != orders[1]


def test_nothing_is_read_after_the_last_epoch() -> None:
    examples = random_examples(30)
    options = {"sequence_length": LENGTH, "batch_size": 7, "seed": 3}
    endless = PackedBatches(examples, **options)
    ending = PackedBatches(examples, **options, epochs=2)
    steps, left = ending.num_steps(2), ending.num_sequences(2) % 7
    assert left, "choose other examples: the last step must not be full"
    assert (steps - 1) * 7 + left == endless.num_sequences(2)
    for step in range(steps):
        want, found = endless.micro_batch(step, 0), ending.micro_batch(step, 0)
        full = 7 if step < steps - 1 else left
        for a, b in zip(want, found, strict=True):
            assert torch.equal(a[:full], b[:full])
        assert (found.labels[full:] == -100).all()
        assert ending.num_labels(step) == int((found.labels != -100).sum())
    assert ending.num_labels(steps) == 0
    assert endless.num_labels(steps) > 0
    learned = sum(ending.num_labels(step) for step in range(steps))
    assert learned == 2 * sum(example.num_labels for example in examples)


def test_stored_documents_are_the_examples_of_their_text(tmp_path) -> None:
    texts = ["".join(map(chr, range(33, 33 + size))) for size in (5, 2, 60, 25, 26)]
    path = write(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    tokens = ArrayTokens(
        np.frombuffer("".join(texts).encode(), dtype=np.uint8), [len(text) for text in texts]
    )
    options = {"sequence_length": LENGTH, "held_out": 0.3}
    want = load(path, end_id=None, **options)
    found = stored_examples(tokens, vocab_size=256, **options)
    assert found.num_cut == want.num_cut == 2
    for a, b in ((found.train, want.train), (found.held_out, want.held_out)):
        assert [e.tokens.tolist() for e in a] == [e.tokens.tolist() for e in b]
    assert len(found.held_out) == 2
    short = ArrayTokens(np.arange(4), [3, 1])
    with pytest.raises(
        ValueError, match=r"document 1: expected at least two tokens, .* got 1 with"
    ):
        stored_examples(short, vocab_size=256, skips=False, **options)
    assert stored_examples(short, vocab_size=256, **options).skipped[0].count == 1
    with pytest.raises(ValueError, match=r"has token 92, .* not lie in the vocabulary of 60"):
        stored_examples(tokens, vocab_size=60, **options)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_row_groups_and_resumed_runs_see_the_same(count: int) -> None:
    examples = random_examples(60)
    options = {"sequence_length": LENGTH, "batch_size": 8, "num_micro_batches": 2, "seed": 5}
    whole = PackedBatches(examples, **options)
    steps = whole.num_sequences(2) // 8
    for step in (steps, 0, steps - 1, 3):  # those of the second epoch first
        for part in range(2):
            want = whole.micro_batch(step, part)
            groups = [
                PackedBatches(examples, **options, group=RowGroup(i, count)).micro_batch(step, part)
                for i in range(count)
            ]
            for index, tensor in enumerate(want):
                assert torch.equal(torch.cat([group[index] for group in groups]), tensor)
        labels = [whole.micro_batch(step, part).labels for part in range(2)]
        assert whole.num_labels(step) == sum(int((each != -100).sum()) for each in labels)


@pytest.mark.parametrize("window", ["before", "target"])
def test_goldfish_drops_the_same_labels_of_an_example_wherever_it_is_packed(window: str) -> None:
    """Windows include the prompt, but not the example before it; prompts never have labels."""
    examples, goldfish = random_examples(60), Goldfish(2, 3, window)
    options = {"sequence_length": LENGTH, "batch_size": 4, "seed": 5}
    plain = PackedBatches(examples, **options)
    made = PackedBatches(examples, **options, goldfish=goldfish)
    kept = set()  # labels; each token occurs in only one example
    for example in examples:
        kept |= set(labels_of(torch.from_numpy(example.tokens), goldfish).tolist())
    num_dropped = 0
    for step in range(made.num_sequences(2) // 4):
        batch, whole = made.micro_batch(step, 0), plain.micro_batch(step, 0)
        assert torch.equal(batch.token_ids, whole.token_ids)
        assert torch.equal(batch.documents, whole.documents)
        want = [label if label in kept else -100 for label in whole.labels.flatten().tolist()]
        assert batch.labels.flatten().tolist() == want
        assert made.num_labels(step) == plain.num_labels(step) == (whole.labels != -100).sum()
        num_dropped += int((batch.labels != whole.labels).sum())
    assert num_dropped > 50


def test_packing_leaves_little_room() -> None:
    examples = random_examples(2000)
    packed = pack(examples, range(2000), LENGTH)
    assert sorted(number for each in packed for number in each) == list(range(2000))
    used = [sum(examples[number].num_places for number in each) for each in packed]
    assert max(used) <= LENGTH
    # One example per sequence would take 2,000 sequences, perfect packing sum(used) / LENGTH.
    assert sum(used) / (len(packed) * LENGTH) > 0.9


def test_held_out_examples_come_once() -> None:
    examples = random_examples(7)
    whole = PackedEvaluation(examples, sequence_length=LENGTH, batch_size=4, num_batches=3)
    batches = [whole.batch(index) for index in range(whole.num_batches)]
    labels = sum(int((batch.labels != -100).sum()) for batch in batches)
    assert labels == whole.num_labels == sum(e.num_labels for e in examples)
    halves = [
        PackedEvaluation(
            examples, sequence_length=LENGTH, batch_size=4, num_batches=3, group=RowGroup(i, 2)
        )
        for i in range(2)
    ]
    for index, batch in enumerate(batches):
        found = torch.cat([half.batch(index).token_ids for half in halves])
        assert torch.equal(found, batch.token_ids)


def test_long_texts_are_cut_and_long_completions_end(tmp_path) -> None:
    text = "".join(map(chr, range(33, 33 + 60)))
    path = write(tmp_path / "a.jsonl", {"text": text}, {"prompt": text[:20], "completion": text})
    examples = load(path, held_out=0)
    assert examples.num_cut == 2
    pieces = [bytes(e.tokens.tolist()).decode() for e in examples.train]
    assert pieces[:3] == [text[:25], text[24:49], text[48:] + "\0"]
    assert pieces[3] == text[:20] + text[:5]
    assert [e.num_labels for e in examples.train] == [24, 24, 12, 5]
    learned = "".join(piece[1:] for piece in pieces[:3])
    assert learned == text[1:] + "\0", "each token of a text is learned once"


def test_a_plain_file_is_one_text(tmp_path) -> None:
    (tmp_path / "b.txt").write_text("hello")
    (tmp_path / "a.txt").write_text("you")
    examples = load(str(tmp_path), held_out=0.5)
    assert bytes(examples.train[0].tokens.tolist()) == b"you\0"
    assert bytes(examples.held_out[0].tokens.tolist()) == b"hello\0"


FIELDS = 'expected an object with "prompt" and "completion", or "text", all strings, or "messages"'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "expected JSON: Expecting property name enclosed in double quotes; it begins '{'"),
        ("[1]", "expected an object; it begins '[1]'"),
        ('{"prompt": "a"}', FIELDS),
        ('{"prompt": "a", "completion": 3}', FIELDS),
        ('{"text": "a", "prompt": "b"}', FIELDS),
        ('{"messages": [], "text": "a"}', FIELDS),
        ('{"messages": "a"}', 'expected "messages" to be a list of at least one object'),
        ('{"messages": [{"content": "a"}]}', 'each with a "role"'),
        ('{"messages": [{"role": "user", "content": "a"}]}', "messages need a chat template"),
        ("[" * 100_000, "expected JSON that is not nested so deeply; it begins '[[["),
    ],
)
def test_a_bad_line_is_named_by_its_number(line, message, tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match="line 3") as error:
        load(str(path))
    assert message in str(error.value)
    assert str(path) in str(error.value)


UNUSABLE = (
    ({"text": "a"}, "expected at least two tokens, and one to learn after the first, got 1 with"),
    ({"text": ""}, "expected at least two tokens, and one to learn after the first, got 0 with"),
    ({"prompt": "ab", "completion": ""}, "got 2 with none to learn"),
    ({"prompt": "p" * 40, "completion": "c"}, "the prompt has 40 tokens, which leave none"),
)


@pytest.mark.parametrize(("line", "message"), UNUSABLE)
def test_what_cannot_be_learned_is_named_if_it_is_not_skipped(line, message, tmp_path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "ab"}, line)
    with pytest.raises(ValueError, match="line 2: ") as error:
        load(path, end_id=None, skips=False)
    assert message in str(error.value)


def test_what_cannot_be_learned_is_skipped_and_counted(tmp_path) -> None:
    write(tmp_path / "b.jsonl", {"text": "ab"}, *(line for line, _ in UNUSABLE))
    (tmp_path / "a.txt").write_text("")
    examples = load(str(tmp_path), end_id=None, held_out=0)
    assert [bytes(e.tokens.tolist()) for e in examples.train] == [b"ab"]
    assert examples.skipped == (
        Skipped("nothing to learn", 4, str(tmp_path / "a.txt")),
        Skipped("no room for learned tokens", 1, f"{tmp_path / 'b.jsonl'}, line 5"),
    )
    (tmp_path / "b.jsonl").unlink()
    message = r"expected at least one example, got none; 1 have nothing to learn \(first: .*a.txt"
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path))


def of_no_tokens(path: str) -> Iterator[Callable[[], object]]:
    part, examples = whole(ArrayTokens(np.arange(50))), random_examples(3)
    options = {"sequence_length": 0, "batch_size": 2}
    yield lambda: load(path, sequence_length=0)
    yield lambda: stored_examples(ArrayTokens(np.arange(4)), vocab_size=9, sequence_length=0)
    yield lambda: PackedBatches(examples, **options).num_labels(0)
    yield lambda: PackedEvaluation(examples, **options, num_batches=1)
    yield lambda: EvaluationBatches([part], **options, num_batches=1)
    yield lambda: RandomWindows(part, **options)
    yield lambda: ShuffledDocuments(part, sequence_length=0)


def test_sequences_of_no_tokens_are_refused(tmp_path) -> None:
    for make in of_no_tokens(write(tmp_path / "a.jsonl", {"text": "ab"})):
        with pytest.raises(ValueError, match="sequence_length must be >= 1, got 0"):
            make()
    examples = [Example(np.arange(3)), Example(np.arange(9))]
    with pytest.raises(ValueError, match=r"example 1: expected at most 4 \+ 1 tokens.*, got 9"):
        PackedEvaluation(examples, sequence_length=4, batch_size=1, num_batches=1)


def test_halves_of_surrogate_pairs_are_replaced(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a\\ud800", "completion": "b"}\n')
    [example] = load(str(tmp_path / "a.jsonl"), held_out=0).train
    assert bytes(example.tokens.tolist()) == b"a?b\0"


def test_an_empty_file_is_named(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ValueError, match="expected at least one example, got none"):
        load(str(tmp_path / "a.jsonl"))


def test_places_are_those_of_the_documents() -> None:
    batch = PackedBatches(random_examples(9), sequence_length=LENGTH, batch_size=2).micro_batch(
        0, 0
    )
    assert batch.documents is not None
    positions = Places.packed(batch.documents).positions
    for row in range(2):
        for document in batch.documents[row].unique():
            here = positions[row][batch.documents[row] == document]
            assert here.tolist() == list(range(len(here)))
