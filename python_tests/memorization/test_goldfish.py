"""The targets that Goldfish loss drops: the documented hash, statistics, and errors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from axonn_ext.train.memorization.goldfish import Goldfish, goldfish_labels, goldfish_mask
from goldfish_cases import GOLDEN, hash_of, labels_of, mix

PAGE = (Path(__file__).parents[2] / "docs" / "memorization.md").read_text()
VECTORS = re.findall(r"^\| ([\d ]+) \| (0x[0-9A-F]{16}) \| (yes|no) \| (yes|no) \|$", PAGE, re.M)
VOCAB = 50_304


def draw(*shape: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


# --- The rule ------------------------------------------------------------------------------------


def test_hashes_of_the_page() -> None:
    assert len(VECTORS) == 8
    for text, number, by_two, by_four in VECTORS:
        window = [int(token) for token in text.split()]
        assert hash_of(window) == int(number, 16)
        tokens = torch.tensor([*window, 5])
        for k, answer in ((2, by_two), (4, by_four)):
            mask = goldfish_mask(tokens, k=k, h=len(window))
            assert mask[:-1].all() and bool(mask[-1]) == (answer == "no")


@pytest.mark.parametrize("window", ["before", "target"])
@pytest.mark.parametrize("k", [2, 3, 4, 7, 10**12, 2**63 - 1])
def test_labels_equal_those_in_python(k: int, window: str) -> None:
    for shape in ((1,), (2,), (14,), (57,), (3, 40), (2, 3, 17), (0, 9), (5, 1)):
        tokens = draw(*shape, vocab=3)
        numbers = torch.cumsum(draw(*shape, seed=1, vocab=9) == 0, -1)
        for h in (1, 2, 13, 16, 17, 100, 2**63 - 1):
            goldfish = Goldfish(k, h, window)
            for documents in (None, numbers, numbers % 2):
                want = labels_of(tokens, goldfish, documents)
                got = goldfish_labels(tokens, goldfish, documents=documents)
                assert torch.equal(got, want) and got.dtype == torch.int64, (shape, h)


def test_int32_and_strides() -> None:
    tokens, goldfish = draw(6, 50, vocab=5), Goldfish(3, 2)
    want = goldfish_labels(tokens, goldfish, documents=tokens)
    for same in (tokens.int(), tokens.t().contiguous().t(), torch.stack([tokens] * 2, -1)[..., 0]):
        assert torch.equal(goldfish_labels(same, goldfish, documents=same), want)


def test_the_first_tokens_of_rows_and_documents_are_kept() -> None:
    tokens = draw(40, 301)
    documents = torch.arange(301).div(100, rounding_mode="floor").expand(40, -1)
    for window in ("before", "target"):
        mask = goldfish_mask(tokens, k=2, h=20, window=window, documents=documents)
        dropped = (~mask).sum(0)  # [i] is about token i + 1
        for begin in (0, 100, 200):
            assert not dropped[max(0, begin - 1) : begin + 19].any()
            # 40 fair coins show both sides, except with probability 2^-39.
            assert (
                (dropped[begin + 19 : begin + 99] > 0) & (dropped[begin + 19 :][:80] < 40)
            ).all()


def test_what_a_smaller_k_keeps_a_larger_one_keeps() -> None:
    tokens = draw(20_000)
    masks = [goldfish_mask(tokens, k=k) for k in (2, 3, 4, 8, 50)]
    for fewer, more in itertools.pairwise(masks):
        assert (more | ~fewer).all() and not torch.equal(more, fewer)


# --- Statistics, of random numbers that are the same in each run ---------------------------------


@pytest.mark.parametrize(("k", "window"), [(4, "before"), (2, "target"), (3, "before")])
def test_two_million_tokens(k: int, window: str) -> None:
    """The share is exact within 0.0025, equal at all positions, and independent of neighbours."""
    rows, length, h = 2_000, 1000, 13
    tokens = draw(rows, length + h)
    dropped = ~goldfish_mask(tokens, k=k, h=h, window=window)[:, h - 1 :]
    assert dropped.shape == (rows, length)
    share = dropped.double().mean().item()
    assert abs(share - 1 / k) < 0.0025  # 6 deviations of 1/2 in two million: 0.0021
    deviation = ((1 / k) * (1 - 1 / k)) ** 0.5
    # All of 1,000 positions, or 2,000 rows, are within 6 deviations, except with probability 2e-5.
    for dim, count in ((0, rows), (1, length)):
        assert (dropped.double().mean(dim) - 1 / k).abs().max() < 6 * deviation / count**0.5
    for distance in (1, 2, h - 1, h, h + 1):
        both = (dropped[:, distance:] & dropped[:, :-distance]).double().mean().item()
        assert abs(both - 1 / k**2) < 0.002  # 6 deviations of a share of 1/4 in two million: 0.0018


@pytest.mark.parametrize(("k", "window"), [(4, "before"), (2, "target")])
def test_one_token_changed_flips_as_a_new_hash_would(k: int, window: str) -> None:
    rows, h = 200_000, 13
    tokens, other = draw(rows, h + 1), draw(rows, seed=1)
    before = goldfish_mask(tokens, k=k, h=h, window=window)[:, -1]
    for place in range(h + 1):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1 + other % (VOCAB - 1)) % VOCAB
        after = goldfish_mask(changed, k=k, h=h, window=window)[:, -1]
        flipped = (before != after).double().mean().item()
        hashed = place < h if window == "before" else place > 0
        assert abs(flipped - (2 / k * (1 - 1 / k) if hashed else 0)) < 0.005, place


@pytest.mark.parametrize(
    "kind", ["zeros", "repeated", "two ids", "high bits", "one bit", "counted", "periodic"]
)
def test_tokens_that_are_not_random(kind: str) -> None:
    """Each h is an independent sample; for 4,000, 5 deviations of a share of 1/4 are 0.034."""
    count = longest = 4000
    draws = {
        "zeros": torch.zeros(longest, dtype=torch.long),
        "repeated": torch.full((longest,), 11),
        "two ids": draw(longest, vocab=2),
        "high bits": draw(longest, vocab=64) << 56,
        "one bit": 1 << draw(longest, vocab=63),
        "counted": torch.arange(longest),
        "periodic": draw(7).repeat(600)[:longest],
    }
    dropped, state = 0, 0
    for token in draws[kind].tolist():  # the hash of h tokens continues that of h - 1
        state = mix(state + token + GOLDEN)
        dropped += state < 2**62
    assert abs(dropped / count - 0.25) < 0.034
    few = draws[kind][:200]
    assert torch.equal(goldfish_labels(few, Goldfish()), labels_of(few, Goldfish()))


def test_the_same_context_is_treated_alike_everywhere() -> None:
    """This holds in other rows, positions and batches, and among other tokens."""
    passage, h = draw(400), 13
    alone = goldfish_mask(passage)[h - 1 :]
    assert 50 < (~alone).sum() < 150  # 5 deviations around 97
    for row, begin in ((0, 0), (1, 1), (2, 77), (3, 500)):
        tokens = draw(4, 1000, seed=row + 1)
        tokens[row, begin : begin + 400] = passage
        inside = goldfish_mask(tokens)[row, begin : begin + 399][h - 1 :]
        assert torch.equal(inside, alone)


def test_threads_and_batches_change_no_bit() -> None:
    tokens = draw(64, 1025, vocab=100)
    documents = torch.cumsum(draw(64, 1025, seed=1, vocab=50) == 0, 1)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(goldfish_labels(tokens, Goldfish(), documents=documents))
    finally:
        torch.set_num_threads(before)
    for parts in (2, 7, 64):
        pairs = zip(tokens.chunk(parts), documents.chunk(parts), strict=True)
        results.append(torch.cat([goldfish_labels(t, Goldfish(), documents=d) for t, d in pairs]))
    assert all(torch.equal(result, results[0]) for result in results[1:])


# --- What is refused -----------------------------------------------------------------------------


def test_what_does_not_fit_is_named() -> None:
    tokens, whole = draw(2, 9), "must be a whole number"
    calls: dict[str, Callable[[], object]] = {
        f"goldfish.k {whole} >= 2, got 1": lambda: goldfish_mask(tokens, k=1),
        f"goldfish.k {whole} >= 2, got 4.0": lambda: Goldfish(k=4.0),
        f"goldfish.k {whole} <= {2**63 - 1}, got {2**63}": lambda: Goldfish(k=2**63),
        f"goldfish.h {whole} >= 1, got 0": lambda: goldfish_mask(tokens, h=0),
        f"goldfish.h {whole} >= 1, got True": lambda: Goldfish(h=True),
        "goldfish.window must be one of before, target, got 'after'": lambda: goldfish_mask(
            tokens, window="after"
        ),
        "tokens must be a Tensor, got list": lambda: goldfish_mask([1, 2]),
        "documents must be a Tensor, got list": lambda: goldfish_mask(tokens, documents=[1]),
        "goldfish must be a Goldfish, got int": lambda: goldfish_labels(tokens, 4),
        "tokens must be int64 or int32, got torch.float32": lambda: goldfish_mask(tokens.float()),
        "documents must be int64 or int32, got torch.bool": lambda: goldfish_mask(
            tokens, documents=tokens > 4
        ),
        r"tokens must have shape \[.., S \+ 1\], got \[\]": lambda: goldfish_mask(tokens[0, 0]),
        r"tokens must have shape \[.., S \+ 1\], got \[2, 0\]": lambda: goldfish_mask(
            tokens[:, :0]
        ),
        r"documents must have the shape of tokens, \[2, 9\], got \[2, 8\]": lambda: goldfish_mask(
            tokens, documents=tokens[:, 1:]
        ),
        "documents is on meta, expected it on cpu": lambda: goldfish_mask(
            tokens, documents=tokens.to("meta")
        ),
    }
    for message, call in calls.items():
        with pytest.raises((ValueError, TypeError), match=message):
            call()
