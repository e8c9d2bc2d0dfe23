"""Permutations, epochs of documents, and mixtures: exact, stateless, the same on every grid."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from axonn_ext.data import (
    ArrayTokens,
    Corpus,
    EvaluationBatches,
    Mixture,
    Part,
    Permutation,
    RandomWindows,
    RowGroup,
    ShuffledDocuments,
    Source,
    TrainingBatches,
    split,
    whole,
)
from axonn_ext.data.corpus import OpenSource
from axonn_ext.data.mixture import BLOCK, parse_mixture, shares
from axonn_ext.data.orders import CHUNK
from axonn_ext.spec.goldfish import Goldfish
from goldfish_cases import labels_of

SIZES = (1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 99, 100, 101, 1000, 1024, 4095, 65_537)


def places(size: int) -> np.ndarray:
    return np.arange(size, dtype=np.int64)


# --- The permutation -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_a_permutation_has_each_place_once(size: int) -> None:
    for key in ((0, 1, 0), (2**63, 2, 5)):
        assert sorted(Permutation(size, key).apply(places(size)).tolist()) == list(range(size))


def test_a_permutation_is_computed_place_by_place() -> None:
    permutation = Permutation(10**12 + 39, (7, 1, 3))
    some = np.array([0, 1, 10**12, 5, 10**12 + 38], dtype=np.int64)
    together = permutation.apply(some)
    assert together.tolist() == [int(permutation.apply(some[i : i + 1])[0]) for i in range(5)]
    assert together.min() >= 0 and together.max() < 10**12 + 39


def reference(size: int, key: tuple[int, ...], place: int) -> int:
    """The function that docs/data.md defines, in Python integers."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(word: int) -> int:
        word &= mask
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
        word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
        return word ^ word >> 31

    a = next(root for root in range(1, size + 2) if root * root >= size)
    b = -(-size // a)
    state = 0
    for word in key:
        state = mix(state + word + golden)
    while True:
        high, low = place // b, place % b
        for round_ in range(8):
            round_key = mix(state + (round_ + 1) * golden)
            if round_ % 2 == 0:
                high = (high + ((mix(low + round_key) >> 32) * a >> 32)) % a
            else:
                low = (low + ((mix(high + round_key) >> 32) * b >> 32)) % b
        place = high * b + low
        if place < size:
            return place


@pytest.mark.parametrize("size", [1, 2, 10, 99, 1000])
def test_a_permutation_is_what_the_documentation_says(size: int) -> None:
    key = (12345, 1, 6)
    got = Permutation(size, key).apply(places(size))
    assert got.tolist() == [reference(size, key, place) for place in range(size)]


def test_permutations_are_fixed() -> None:
    """A resumed run must read the same documents with a later version of this package."""
    assert Permutation(10, (0, 1, 0)).apply(places(10)).tolist() == [2, 9, 1, 0, 6, 8, 3, 7, 4, 5]


def test_permutations_differ_by_each_word_of_the_key() -> None:
    made = [
        tuple(Permutation(50, key).apply(places(50)).tolist())
        for key in ((0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1), (0, 1, 2))
    ]
    assert len(set(made)) == len(made)


def test_permutations_look_random() -> None:
    """Over 12,000 keys, the images of each of 12 positions are uniform by a chi-squared test."""
    counts = np.zeros((12, 12))
    for epoch in range(12_000):
        counts[np.arange(12), Permutation(12, (3, 1, epoch)).apply(places(12))] += 1
    chi_squared = float(((counts - 1000) ** 2 / 1000).sum())
    # 121 degrees of freedom: mean 121, standard deviation 15.6; five deviations on either side.
    assert 43 < chi_squared < 199, chi_squared


@pytest.mark.parametrize("size", [0, -1, 2**62 + 1])
def test_sizes_without_a_permutation(size: int) -> None:
    with pytest.raises(ValueError, match=rf"size must be from 1 to 2\*\*62, got {size}"):
        Permutation(size, (0,))


# --- Documents -----------------------------------------------------------------------------------


def documents(count: int, *, seed: int = 0, most: int = 12) -> ArrayTokens:
    """Documents of random lengths, some empty; no two tokens are equal."""
    lengths = np.random.default_rng(seed).integers(0, most, count)
    return ArrayTokens(np.arange(lengths.sum()), lengths.tolist())


def epoch_of(part: Part, *, epoch: int, seed: int, length: int, source: int = 0) -> list[int]:
    """The token stream of an epoch, from its sequences; tokens shared by neighbours count once."""
    order = ShuffledDocuments(part, sequence_length=length, seed=seed, source=source)
    count = order.sequences_per_epoch
    rows = np.empty((count, length + 1), dtype=np.int64)
    rows[Permutation(count, (seed, 4, epoch, source)).apply(places(count))] = order.sequences(
        epoch * count, count
    )
    assert (rows[1:, 0] == rows[:-1, -1]).all()
    return [*rows[:, :-1].reshape(-1).tolist(), int(rows[-1, -1])]


@pytest.mark.parametrize("count", [1, 2, 30, 3 * CHUNK + 5])
def test_every_token_occurs_once_an_epoch(count: int) -> None:
    tokens = ArrayTokens(np.arange(40), [40]) if count == 1 else documents(count, most=40)
    part = whole(tokens)
    streams = [epoch_of(part, epoch=epoch, seed=seed, length=8) for epoch, seed in ((0, 0), (3, 1))]
    for stream in streams:
        left_out = tokens.num_tokens - len(stream)
        assert 0 <= left_out < 8  # S more tokens would make another sequence
        assert len(set(stream)) == len(stream)
    if count > 2:
        assert streams[0] != streams[1]


@pytest.mark.parametrize("more", range(8))
def test_the_last_tokens_are_left_out_only_if_they_are_no_sequence(more: int) -> None:
    """Sequences of 8 tokens, which start where chunks end; `more` tokens are not enough for one."""
    lengths = [8] * (2 * CHUNK) + [1] * (1 + more)
    tokens = ArrayTokens(np.arange(sum(lengths)), lengths)
    stream = epoch_of(whole(tokens), epoch=1, seed=2, length=8)
    assert len(set(stream)) == len(stream) == 16 * CHUNK + 1


def test_an_epoch_is_the_documents_in_the_order_of_the_permutation() -> None:
    tokens = documents(100)
    sent = Permutation(100, (5, 1, 2, 3)).apply(places(100))
    begins, ends = tokens.starts(sent), tokens.starts(sent + 1)
    expected = [token for a, b in zip(begins, ends, strict=True) for token in range(a, b)]
    got = epoch_of(whole(tokens), epoch=2, seed=5, length=4, source=3)
    assert got == expected[: len(got)]


def test_epochs_and_seeds_differ() -> None:
    part = whole(documents(60))
    streams = {
        tuple(epoch_of(part, epoch=epoch, seed=seed, length=4))
        for epoch in (0, 1)
        for seed in (0, 1)
    }
    assert len(streams) == 4


def test_a_long_document_does_not_fill_batches() -> None:
    """There are 4 documents of 1,000 tokens, and batches of 8 sequences of 32 tokens."""
    part = whole(ArrayTokens(np.arange(4000), [1000] * 4))
    made = TrainingBatches(ShuffledDocuments(part, sequence_length=32), batch_size=8)
    found = [set((made.micro_batch(step, 0)[0] // 1000).reshape(-1).tolist()) for step in range(15)]
    assert min(map(len, found)) >= 2
    assert sum(map(len, found)) / len(found) > 3


def test_single_sequences_are_those_of_a_batch() -> None:
    """This also holds if chunks between them are skipped."""
    part = whole(documents(9 * CHUNK + 77, most=5))
    together = ShuffledDocuments(part, sequence_length=50, seed=2).sequences(0, 300)
    alone = ShuffledDocuments(part, sequence_length=50, seed=2)
    for number in (299, 0, 7, 123):
        assert alone.sequences(number, 1)[0].tolist() == together[number].tolist()
    assert alone.sequences(5, 0).shape == (0, 51)


def test_sources_of_a_mixture_draw_different_places() -> None:
    part = whole(ArrayTokens(np.arange(5000), [10] * 500))
    for order in ("windows", "documents"):
        source = Source("x", 0.5)
        opened = OpenSource(source, part.tokens, part, part)
        made = Corpus((opened, opened), order, (0.5, 0.5)).training_order(
            sequence_length=8, batch_size=16, seed=1
        )
        first, second = (each.sequences(0, 16)[:, 0] for each in made._orders)
        assert len(np.intersect1d(first, second)) < 4


def batches(
    order: object, *, group: RowGroup | None = None, parts: int = 1,
    goldfish: Goldfish | None = None,
) -> TrainingBatches:  # fmt: skip
    return TrainingBatches(
        order, batch_size=24, num_micro_batches=parts, group=group, goldfish=goldfish
    )


def stays_in_its_document(part: Part, row: np.ndarray) -> list[bool]:
    """Whether each token of a row is in the same document as the token before it.

    All tokens of the part differ, so each token identifies its position.
    """
    tokens = part.tokens.read(0, part.tokens.num_tokens)
    starts = part.tokens.starts(np.arange(part.tokens.num_documents))
    place = {int(token): index for index, token in enumerate(tokens)}
    number = [max(i for i, s in enumerate(starts) if s <= place[int(token)]) for token in row]
    return [a == b for a, b in pairwise(number)]


@pytest.mark.parametrize("kind", ["windows", "documents"])
def test_documents_are_those_of_the_tokens(kind: str) -> None:
    """Corpora: with empty documents, with a single document, and a part that starts inside one."""
    lengths = np.random.default_rng(2).integers(0, 9, 60)
    lengths[[0, 7, 8, 59]] = 0
    many = ArrayTokens(np.arange(lengths.sum()) + 5, lengths.tolist())
    one = ArrayTokens(np.arange(50))
    parts = [whole(many), whole(one), split(many, 0.4, by_documents=kind == "documents")[1]]
    for part in parts:
        made = (
            RandomWindows(part, sequence_length=11, batch_size=4, seed=1)
            if kind == "windows"
            else ShuffledDocuments(part, sequence_length=11, seed=1)
        )
        sequences, numbers = made.sequences(3, 40), made.documents(3, 40)
        assert numbers.shape == sequences.shape == (40, 12) and numbers.dtype == np.int64
        for row, of in zip(sequences, numbers, strict=True):
            assert [a == b for a, b in pairwise(of)] == stays_in_its_document(part, row)
        assert made.documents(3, 0).shape == (0, 12)


def orders(kind: str) -> object:
    """A new order, as another rank or a resumed run would make it."""
    first, second = whole(documents(90, most=30)), whole(documents(50, seed=1, most=30))
    if kind == "documents":
        return ShuffledDocuments(first, sequence_length=6, seed=3)
    if kind == "windows":
        return RandomWindows(first, sequence_length=6, batch_size=24, seed=3)
    mixed = [ShuffledDocuments(part, sequence_length=6, seed=3) for part in (first, second)]
    return Mixture(mixed, shares([0.7, 0.3]), seed=3)


@pytest.mark.parametrize("kind", ["windows", "documents", "mixture"])
def test_goldfish_drops_the_same_labels_on_every_grid(kind: str) -> None:
    """They follow the rule in Python for the order's documents; nothing else changes."""
    goldfish = Goldfish(k=2, h=2)
    found: list[torch.Tensor] = []
    for count, parts in ((1, 1), (2, 1), (2, 3), (4, 2)):
        groups = [RowGroup(index, count) for index in range(count)]
        made = [batches(orders(kind), group=g, parts=parts, goldfish=goldfish) for g in groups]
        plain = [batches(orders(kind), group=g, parts=parts) for g in groups]
        rows, whole_rows = (
            [each.micro_batch(2, part) for part in range(parts) for each in those]
            for those in (made, plain)
        )
        for row, whole_row in zip(rows, whole_rows, strict=True):
            assert torch.equal(row.token_ids, whole_row.token_ids) and row.documents is None
        assert {each.num_labels(2) for each in made} == {24 * 6}
        found.append(torch.cat([each.labels for each in rows]))
    order = orders(kind)
    tokens, documents = (
        torch.from_numpy(look(48, 24)) for look in (order.sequences, order.documents)
    )
    assert torch.equal(found[0], labels_of(tokens, goldfish, documents))
    assert not torch.equal(found[0], labels_of(tokens, goldfish)), "no document ends in this step"
    assert (found[0] == -100).any()
    assert all(torch.equal(each, found[0]) for each in found[1:])


@pytest.mark.parametrize("kind", ["windows", "documents", "mixture"])
def test_every_split_reads_the_same_batches(kind: str) -> None:
    steps = range(25)  # epochs have about 200 sequences, so some batches span two
    expected = [batches(orders(kind)).micro_batch(step, 0)[0] for step in steps]
    for parts, groups in ((1, 2), (2, 3), (3, 4), (4, 1)):
        ranks = [
            batches(orders(kind), group=RowGroup(index, groups), parts=parts)
            for index in range(groups)
        ]
        for step in steps:
            got = [rank.micro_batch(step, part)[0] for part in range(parts) for rank in ranks]
            torch.testing.assert_close(torch.cat(got), expected[step], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["windows", "documents", "mixture"])
def test_a_step_needs_none_before_it(kind: str) -> None:
    running = batches(orders(kind))
    for step in range(30):
        got = running.micro_batch(step, 0)
        if step in (1, 9, 17, 29):
            torch.testing.assert_close(got, batches(orders(kind)).micro_batch(step, 0))


def test_labels_are_the_next_tokens() -> None:
    token_ids, labels, _ = batches(orders("documents")).micro_batch(0, 0)
    torch.testing.assert_close(token_ids[:, 1:], labels[:, :-1])


def test_documents_held_out_are_the_last() -> None:
    tokens = ArrayTokens(np.arange(100), [10] * 10)
    train, held_out = split(tokens, 0.2, by_documents=True)
    assert (train.count, train.num_documents) == (80, 8)
    assert held_out.read(0, held_out.count).tolist() == list(range(80, 100))
    assert split(tokens, 0.01, by_documents=True)[1].num_documents == 1
    assert split(tokens, 0, by_documents=True)[1].count == 0
    assert max(epoch_of(train, epoch=0, seed=0, length=5)) < 80


def test_too_short() -> None:
    with pytest.raises(ValueError, match=r"training text has 7 tokens.* needs 8"):
        ShuffledDocuments(whole(ArrayTokens(np.arange(7))), sequence_length=7)


@pytest.mark.parametrize("lengths", [[50], []])
def test_the_only_document_is_held_out(lengths: list[int]) -> None:
    tokens = ArrayTokens(np.arange(50), lengths) if lengths else ArrayTokens(np.arange(0), [0])
    tokens.num_documents = len(lengths)
    part, _ = split(tokens, 0.1, by_documents=True)
    with pytest.raises(ValueError, match=r"has 0 tokens, .* document.* held out \(data\.held_out"):
        ShuffledDocuments(part, sequence_length=7)


def test_tokens_outside_of_the_vocabulary_are_named() -> None:
    part = whole(ArrayTokens(np.array([1, 2, 300, 4])), vocab_size=256)
    assert part.read(0, 2).tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"text has token 300, .* vocabulary of 256; raise model"):
        part.read(1, 3)
    with pytest.raises(ValueError, match=r"has token -1"):
        whole(ArrayTokens(np.array([-1])), vocab_size=256).read(0, 1)


# --- Mixtures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1], [1024]),
        ([0.7, 0.3], [717, 307]),
        ([1, 1, 1], [342, 341, 341]),
        ([3, 1], [768, 256]),
        ([1e308, 1e308], [512, 512]),
        ([1e-320, 1e-320], [512, 512]),
        ([1e308, 1e-320], [1024, 0]),
    ],
)
def test_shares_have_the_largest_remainders(weights: list[float], expected: list[int]) -> None:
    assert shares(weights) == expected


def test_each_block_has_the_exact_shares() -> None:
    expected = shares([0.5, 0.3, 0.2])
    order = Mixture([orders("documents")] * 3, expected, seed=4)
    sources, numbers = order.places(0, 5 * BLOCK)
    blocks = sources.reshape(5, BLOCK)
    for block in blocks:
        assert np.bincount(block, minlength=3).tolist() == expected
    assert len({tuple(block) for block in blocks}) == 5
    for index in range(3):  # each source's own sequences come in turn
        assert numbers[sources == index].tolist() == list(range(5 * expected[index]))
    some = order.places(3000, 100)
    assert some[0].tolist() == sources[3000:3100].tolist()
    assert some[1].tolist() == numbers[3000:3100].tolist()


def test_a_mixture_takes_the_sources_own_sequences() -> None:
    mixture = orders("mixture")
    sources, numbers = mixture.places(500, 60)
    rows = mixture.sequences(500, 60)
    for row, source, number in zip(rows, sources, numbers, strict=True):
        own = mixture._orders[source].sequences(int(number), 1)[0]
        assert row.tolist() == own.tolist()


def test_evaluation_of_a_mixture_has_windows_of_each_part() -> None:
    parts = [whole(ArrayTokens(np.arange(first, first + 500))) for first in (0, 1000)]
    made = EvaluationBatches(
        parts, weights=[0.75, 0.25], sequence_length=5, batch_size=4, num_batches=2
    )
    starts = torch.cat([made.batch(index)[0] for index in range(2)])[:, 0].tolist()
    assert starts == [0, 98, 197, 296, 395, 494, 1000, 1494]


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=x", "a=0", "a=-1", "a=nan", "a=inf", "a=1,"])
def test_mixtures_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected PATH=WEIGHT with a weight > 0, got "):
        parse_mixture(text)


def test_mixtures() -> None:
    assert parse_mixture("a=0.7, b/c=3") == (("a", 0.7), ("b/c", 3.0))
    assert parse_mixture("x=y=1e-2") == (("x=y", 0.01),)
    with pytest.raises(ValueError, match=r"share >= 1 for each of 2 sources, .* got \[1024, 0\]"):
        Mixture([orders("documents")] * 2, [1024, 0])
