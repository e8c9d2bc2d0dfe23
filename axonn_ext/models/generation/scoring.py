"""The probability of given tokens, on any grid.

Legend: B sequences of a (data, z) group, S tokens of each, n rows of logits, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from axonn_ext.models.generation.decode import check_equal
from axonn_ext.models.transformer import Transformer
from axonn_ext.nn import Places
from axonn_ext.ranks.grid import Grid

TOKENS_AT_ONCE = 1 << 12  # of a (data, z) group, whose logits are in memory together


class Score(NamedTuple):
    """The score of the last tokens of a sequence, given those before them.

    log_probability: the sum over the tokens, in nats. is_greedy: whether each token is the most
    likely one in its place.
    """

    log_probability: float
    is_greedy: bool


@torch.no_grad()
def score(
    model: Transformer,
    sequences: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    tokens_at_once: int = TOKENS_AT_ONCE,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Score]:
    """Returns the scores of the last counts[i] tokens of each sequences[i], equal on every rank.

    A sequence may have one token more than the model's sequence length, as its last token only is a
    label. All ranks pass the same arguments. Sequences of similar lengths are computed together, up
    to tokens_at_once tokens (but at least one sequence) in each (data, z) group; ranks of x and y
    compute in layout "replicated". Softmax is computed in fp32 (fp64 for fp64), sums in fp64.
    advance: called after each batch with its number of sequences. Collectives for each batch: those
    of the model in this layout, and all-gathers of four numbers per scored token over x, and of two
    per sequence over z and data.

    Raises ValueError if ranks have different arguments, a sequence is too short or too long, or has
    an id outside of the vocabulary.
    """
    check_equal(model, "score", (sequences, counts))
    for number, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        _check(number, sequence, count, model)
    grid, plain = model.grid, model.replicated()
    groups = grid.num_parts(("data", "z"))
    found: dict[int, Score] = {}
    for numbers in batches([len(sequence) for sequence in sequences], groups, tokens_at_once):
        batch = _Batch.of([(sequences[n], counts[n]) for n in numbers], grid, model.table.weight)
        for number, each in zip(numbers, batch.scores(plain), strict=False):
            found[number] = each
        advance(len(numbers))
    return [found[number] for number in range(len(sequences))]


def batches(lengths: Sequence[int], groups: int, tokens_at_once: int) -> Iterator[list[int]]:
    """Yields batches of the numbers of sequences of these lengths, the longest sequences first.

    tokens_at_once: the most tokens of a batch in one of the groups, with padding.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    first = 0
    while first < len(order):
        count = max(1, tokens_at_once // max(1, lengths[order[first]])) * groups
        yield order[first : first + count]
        first += count


def windows(
    tokens: Sequence[int], length: int, prefix: int | None = None
) -> Iterator[tuple[list[int], int]]:
    """Yields sequences of at most length + 1 tokens and the number of last ones to score.

    Each token is scored once, and the last one with as many tokens before it as fit.
    prefix: an id before the first token, which is not scored without one.

    Source: lm-evaluation-harness, get_rolling_token_windows with a context of one token.
    """
    whole = [*([] if prefix is None else [prefix]), *tokens]
    done = 1
    while done < len(whole):
        end = min(done + length, len(whole))
        yield whole[max(0, end - length - 1) : end], end - done
        done = end


def _check(number: int, sequence: Sequence[int], count: int, model: Transformer) -> None:
    longest, size = model.config.sequence_length + 1, model.config.vocab_size
    if not 0 < count < len(sequence) <= longest:
        raise ValueError(
            f"score: sequence {number}: expected at most {longest} tokens, of which at least the "
            f"first is not scored, got {len(sequence)}, {count} of them scored"
        )
    if not 0 <= min(sequence) <= max(sequence) < size:
        raise ValueError(
            f"score: sequence {number}: token ids must be in [0, {size}), got {min(sequence)} to "
            f"{max(sequence)}"
        )


class _Batch(NamedTuple):
    """The sequences of this (data, z) group, padded to the same sizes in all groups.

    tokens [B, S]    lengths [B]    rows [n]: which of the B * S tokens come before a scored one
    labels [n]       owners [n]: the sequence of each row; B for padding
    """

    grid: Grid
    tokens: Tensor
    lengths: Tensor
    rows: Tensor
    labels: Tensor
    owners: Tensor

    @classmethod
    def of(cls, requests: Sequence[tuple[Sequence[int], int]], grid: Grid, like: Tensor) -> _Batch:
        axes = ("data", "z")
        each = -(-len(requests) // grid.num_parts(axes))
        shares = [requests[first : first + each] for first in range(0, len(requests), each)]
        longest = max(len(sequence) for sequence, _ in requests) - 1
        num_rows = max(sum(count for _, count in share) for share in shares)
        part = grid.part(axes)
        own = shares[part] if part < len(shares) else []
        tokens, lengths = torch.zeros(each, longest, dtype=torch.int64), torch.ones(each).long()
        rows: list[int] = []
        labels: list[int] = []
        owners: list[int] = []
        for number, (sequence, count) in enumerate(own):
            end = len(sequence) - 1
            tokens[number, :end], lengths[number] = torch.tensor(sequence[:-1]), end
            rows += range(number * longest + end - count, number * longest + end)
            labels += sequence[-count:]
            owners += [number] * count
        padding = num_rows - len(rows)
        lists = (rows + [0] * padding, labels + [0] * padding, owners + [each] * padding)
        tensors = (tokens, lengths, *map(torch.tensor, lists))
        return cls(grid, *(tensor.to(like.device) for tensor in tensors))

    def scores(self, model: Transformer) -> list[Score]:
        """Returns the scores of the sequences of all groups, and behind them those of padding."""
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        # No token attends to the padding of shorter sequences.
        places = Places(index.expand_as(self.tokens), lengths=self.lengths)
        logits = model.logits_at(self.tokens, places, self.rows)
        values = _of_rows(logits if logits.dtype == torch.float64 else logits.float(), self)
        sums = values.new_zeros(len(self.tokens) + 1, 2).index_add_(0, self.owners, values)
        found = self.grid.unshard(sums[:-1].contiguous(), {0: ("data", "z")})
        return [Score(total, not misses) for total, misses in found.tolist()]


def _of_rows(logits: Tensor, batch: _Batch) -> Tensor:
    """Returns the log-probability of each label, and 1 if another token is likelier: fp64 [n, 2].

    logits: [n, V / Gx]. Only four numbers per row cross x.
    """
    columns = logits.shape[1]
    first = batch.grid.axis("x").rank * columns
    places = batch.labels - first
    own = logits.gather(1, places.clamp(0, columns - 1)[:, None])[:, 0]
    own = own.masked_fill((places < 0) | (places >= columns), -torch.inf)
    top, index = logits.max(1)
    four = (logits.logsumexp(1), own, top, index + first)
    numbers = torch.stack([each.double() for each in four], 1)
    whole = batch.grid.unshard(numbers[None], {0: ("x",)})  # [Gx, n, 4]
    totals, labels, tops, indices = whole.unbind(2)
    greedy = indices.gather(0, tops.argmax(0, keepdim=True))[0]
    return torch.stack([labels.amax(0) - totals.logsumexp(0), (greedy != batch.labels).double()], 1)
