"""Continues sequences token by token, with a KV cache, on any grid.

Legend: B sequences of a (data, z) group, S tokens that enter the model at once, V the vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axonn_ext.models.generation.sampling import NOT_FINITE, Sampling, choose
from axonn_ext.models.transformer import Transformer
from axonn_ext.nn import KeyValueCache, Places
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.grid import AXES

GREEDY = Sampling()


class NotFiniteError(ValueError):
    """The logits of a sequence are not finite, so that no token can be chosen."""


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_ids: Collection[int] = (),
    num_tokens: int | None = None,
) -> list[list[int]]:
    """Returns the ids of the tokens that follow each prompt, equal on every rank; see `stream`."""
    found: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(
        model, prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids,
        num_tokens=num_tokens,
    ):  # fmt: skip
        for sequence, token in zip(found, tokens, strict=True):
            if token is not None:
                sequence.append(token)
    return found


@torch.no_grad()
def stream(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_ids: Collection[int] = (),
    num_tokens: int | None = None,
) -> Iterator[list[int | None]]:
    """Yields the next token of each prompt, equal on every rank, until all have ended.

    A sequence ends with one of stop_ids, which is its last token, or after max_new_tokens; ended
    sequences yield None. num_tokens: ids from this number on are chosen only if they are in
    stop_ids; default the size of the model's vocabulary.

    All ranks pass the same arguments and take the same number of tokens. The sequences are split
    over data and z; ranks of x and y compute in layout "replicated", whatever the model's layout.
    The keys and values of a sequence stay in memory: 2 L H / x numbers per token for L blocks whose
    key-value heads have H features together (at least a whole head). Collectives for each token:
    those of the model in this layout, an all-gather of the last logits over x, and one of the
    chosen tokens over z and data.

    Raises ValueError if a prompt is empty, has an id outside of the vocabulary, or leaves less than
    max_new_tokens of the model's sequence length, or if ranks have different arguments; and
    NotFiniteError, a ValueError, on every rank, if logits are not finite.
    """
    prompts = [[int(token) for token in prompt] for prompt in prompts]
    arguments = (prompts, max_new_tokens, sampling, sorted(stop_ids), num_tokens)
    check_equal(model, "generate", arguments)
    check_prompts(prompts, max_new_tokens, model.config.sequence_length, model.config.vocab_size)
    never = _never_chosen(model, stop_ids, num_tokens)
    decoder = _Decoder.of(model, prompts, max_new_tokens)
    ended = [False] * len(prompts)
    for index in range(max_new_tokens):
        logits = decoder.logits().masked_fill(never, -torch.inf)
        chosen = decoder.take(choose(logits, sampling, decoder.numbers, index))[: len(prompts)]
        if NOT_FINITE in chosen:
            raise NotFiniteError(f"prompt {chosen.index(NOT_FINITE)}: its logits are not finite")
        yield [None if done else token for token, done in zip(chosen, ended, strict=True)]
        ended = [done or token in stop_ids for token, done in zip(chosen, ended, strict=True)]
        if all(ended):
            return


def _never_chosen(model: Transformer, stop_ids: Collection[int], num_tokens: int | None) -> Tensor:
    """Returns which ids of the vocabulary are never chosen, bool [V]."""
    size = model.config.vocab_size
    if num_tokens is not None and num_tokens < 1:
        raise ValueError(f"num_tokens must be >= 1, got {num_tokens}")
    never = torch.arange(size) >= (size if num_tokens is None else num_tokens)
    never[[token for token in stop_ids if 0 <= token < size]] = False
    return never.to(model.table.weight.device)


def check_prompts(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, sequence_length: int, vocab_size: int,
    *, places: Sequence[str] = (),
) -> None:  # fmt: skip
    """Raises ValueError for prompts that a model of these sizes cannot continue.

    places: the origin of each prompt, for messages; default its number.
    """
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    places = places or [f"prompt {number}" for number in range(len(prompts))]
    for where, prompt in zip(places, prompts, strict=True):
        if not prompt:
            raise ValueError(f"{where}: expected at least one token, got none")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise ValueError(
                f"{where}: token ids must be in [0, {vocab_size}), got {min(prompt)} to "
                f"{max(prompt)}"
            )
        if len(prompt) + max_new_tokens > sequence_length:
            raise ValueError(
                f"{where}: its {len(prompt)} tokens and {max_new_tokens} new ones are more than "
                f"the model's sequence_length of {sequence_length}"
            )


@dataclass
class _Decoder:
    """The state of a group's sequences.

    tokens: [B, S], the tokens so far, each sequence from the left, and room for those to come.
    lengths: [B], each sequence's length. restarts: the steps that compute all tokens again: the
    first, and, with longrope, those at which a sequence of any group gets other frequencies, which
    its cached keys do not have.
    """

    model: Transformer
    caches: list[KeyValueCache]
    numbers: range  # of the group's sequences among all
    tokens: Tensor
    lengths: Tensor
    longest: int  # of the prompts of all groups, as collectives need equal row counts
    restarts: frozenset[int]
    step: int = 0

    @classmethod
    def of(cls, model: Transformer, prompts: Sequence[Sequence[int]], new: int) -> _Decoder:
        numbers = _share(model.grid, len(prompts))
        # Groups beyond the last prompt repeat it, since all ranks take part in the collectives.
        own = [prompts[min(number, len(prompts) - 1)] for number in numbers]
        longest, device = max(map(len, prompts)), model.table.weight.device
        tokens = torch.tensor([[*prompt, *[0] * (longest + new - len(prompt))] for prompt in own])
        lengths = torch.tensor([len(prompt) for prompt in own])
        rope, restarts = model.config.rope_scaling, {0}
        if rope is not None and rope.rope_type == "longrope":
            restarts |= {rope.original_max_position_embeddings + 1 - len(p) for p in prompts}
        return cls(
            model.replicated(), [], numbers, tokens.to(device), lengths.to(device), longest,
            frozenset(restarts),
        )  # fmt: skip

    def logits(self) -> Tensor:
        """Returns the logits of the next token of each sequence, fp32 [B, V], equal on x and y."""
        if self.step in self.restarts:
            # No token attends to the padding of shorter sequences, and later tokens replace it.
            tokens = self.tokens[:, : self.longest + self.step]
            index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            places, last = Places(index, lengths=self.lengths), self.lengths - 1
            self.caches = [KeyValueCache(self.tokens.shape[1]) for _ in self.model.blocks]
        else:
            index = self.lengths[:, None] - 1
            tokens, last = self.tokens.gather(1, index), torch.zeros_like(self.lengths)
            places = Places.cached(index, self.lengths)
        rows = torch.arange(len(last), device=last.device) * tokens.shape[1] + last
        local = self.model.logits_at(tokens, places, rows, self.caches)
        whole = self.model.grid.unshard(local, {1: ("x",)})
        return whole[:, : self.model.config.vocab_size].float()  # without padding

    def take(self, chosen: Tensor) -> list[int]:
        """Appends a token to each sequence of the group; returns the tokens of all groups."""
        self.tokens.scatter_(1, self.lengths[:, None], chosen[:, None])
        self.lengths, self.step = self.lengths + 1, self.step + 1
        whole = self.model.grid.unshard(chosen, {0: ("data", "z")})
        return [int(token) for token in whole]


def _share(grid: Grid, count: int) -> range:
    """Returns the sequence numbers of this rank's (data, z) group; all groups have equal counts."""
    axes = ("data", "z")
    each = -(-count // grid.num_parts(axes))
    first = grid.part(axes) * each
    return range(first, first + each)


def check_equal(model: Transformer, what: str, arguments: object) -> None:
    """Raises ValueError, which names `what`, on every rank if the ranks have different arguments.

    Collectives: all-gathers of a number.
    """
    digest = hashlib.sha256(repr(arguments).encode()).digest()
    device = model.table.weight.device
    own = torch.tensor([int.from_bytes(digest[:7], "big")], device=device)
    found = model.grid.unshard(own, {0: AXES})
    if not bool((found == own).all()):
        ranks = ", ".join(str(rank) for rank in range(len(found)) if found[rank] != found[0])
        raise ValueError(f"{what}: all ranks must pass the same arguments, but not rank {ranks}")
