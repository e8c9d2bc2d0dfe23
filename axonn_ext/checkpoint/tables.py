"""Compares, before a save or load, which tensors each rank has."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.layout import Layout, coords
from axonn_ext.checkpoint.manifest import StoredTensor, table_entry, tensor_of
from axonn_ext.checkpoint.ranks import Ranks
from axonn_ext.spec.files.errors import first_of

_MOST_NAMES, _MOST_DIGESTS = 4, 4  # in a message
_Said = Mapping[str, Mapping[str, Any]]  # by stage and digest: the first rank, and maybe the table


def agreed_tables(
    tensors: Mapping[str, StoredTensor], stage: Layout, ranks: Ranks
) -> dict[str, StoredTensor]:
    """Returns, on rank 0, the tensors of all pipeline stages; {} on others.

    Each rank sends a digest, and one rank of each stage its table. Raises CheckpointError, on every
    rank, if the ranks of a stage have different tensors, or if two stages have different tensors
    of the same name.
    """
    text = json.dumps({name: table_entry(tensor) for name, tensor in sorted(tensors.items())})
    own, digest = json.loads(text), hashlib.sha256(text.encode()).hexdigest()
    (number,) = stage.where.get("pipe", (0,))
    is_first = not any(v for axis, v in coords(stage.grid, ranks.rank).items() if axis != "pipe")
    tables: list[Mapping[str, Any]] = []

    def answer(said: _Said) -> list[int]:
        """Keeps the tables on rank 0; returns two ranks of a stage that differ, or none."""
        stages = [said[number] for number in sorted(said, key=int)]
        tables.extend(table for digests in stages for _, table in digests.values() if table)
        differing = (digests for digests in stages if len(digests) > 1)
        return sorted(rank for rank, _ in next(differing, {}).values())[:2]

    own_words = {str(number): {digest: [ranks.rank, own if is_first else None]}}
    if both := ranks.reduced(own_words, _merged, answer):
        problem = ranks.reduced(
            {str(ranks.rank): own} if ranks.rank in both else {}, operator.or_,
            lambda shown: first_of([*_differences(both, shown)], _MOST_NAMES),
        )  # fmt: skip
        raise CheckpointError(f"ranks {both[0]} and {both[1]} have different tensors: {problem}")
    found: dict[str, StoredTensor] = {}

    def join() -> None:
        for name, value in (item for table in tables for item in table.items()):
            tensor = tensor_of(name, value, ranks.size)
            first = found.setdefault(name, tensor)  # stages that share a tensor must agree on it
            sides = [f"{each.dtype} {list(each.shape)}" for each in (first, tensor)]
            # Shared tensors are written once. A number, such as a step, may belong to each stage.
            if any(_is_shared(each) for each in (first, tensor)) and first != tensor:
                sides[1] = "split differently" if sides[0] == sides[1] else sides[1]
            if sides[0] != sides[1]:
                raise CheckpointError(
                    f"{name}: expected it alike on all pipeline stages, got {sides[0]} "
                    f"and {sides[1]}"
                )

    ranks.told(join)
    return found


def _is_shared(tensor: StoredTensor) -> bool:
    """Returns whether several pipeline stages have it."""
    return isinstance(tensor.layout, Layout) and len(tensor.layout.where.get("pipe", ())) > 1


def _merged(one: _Said, other: _Said) -> dict[str, dict[str, Any]]:
    merged = {stage: dict(digests) for stage, digests in one.items()}
    for stage, digests in other.items():
        mine = merged.setdefault(stage, {})
        for digest, (rank, table) in digests.items():
            first, own = mine.get(digest, (rank, None))
            mine[digest] = [min(first, rank), own or table]
        merged[stage] = dict(sorted(mine.items(), key=lambda item: item[1][0])[:_MOST_DIGESTS])
    return merged


def _differences(ranks: Sequence[int], tables: _Said) -> Iterator[str]:
    """Yields how two ranks differ, a phrase for each tensor."""
    one, other = (tables[str(rank)] for rank in ranks)
    for name in sorted(one.keys() | other.keys()):
        # Turns follow from the other tensors.
        entries = [{**table[name], "turn": 0} if name in table else None for table in (one, other)]
        if entries[0] != entries[1]:
            sides = [
                f"{entry['dtype']} {entry['shape']}" if entry else "missing" for entry in entries
            ]
            what = "split differently" if sides[0] == sides[1] else sides[1]
            yield f"{name} is {sides[0]} on rank {ranks[0]}, {what} on rank {ranks[1]}"
