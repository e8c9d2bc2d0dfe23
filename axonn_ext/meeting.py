"""How ranks meet through a store of c10d: all must come, and must say the same.

Whatever the number of ranks, each uses the store some eight times. If they differ, the last one
tells which ranks say the same, and each reads at most MOST_SAID different sayings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from axonn_ext import settings
from axonn_ext._version import __version__
from axonn_ext.inputs.errors import MAX_SHOWN, clipped, first_of
from axonn_ext.stores import comes

MOST_SAID = 8  # different sets of values of which a message tells
MOST_KEYS = 8  # keys that a message names
_MOST_RANGES = 16
_BEFORE = 20  # characters of a long value that are shown before the first that differs
_FAILED = "failed"  # what a rank says that has found a mistake of its own
_NOT_SET = "not set"


class RanksDiffer(RuntimeError):
    """Values that must be equal on all ranks are not; each of `problems` names one of them."""

    def __init__(self, what: str, problems: Sequence[str]) -> None:
        self.problems = [f"{what}: {problem}" if what else problem for problem in problems]
        super().__init__("\n".join(self.problems))


class RanksMissing(RuntimeError):
    """Some ranks did not come in time."""


class RanksFailed(RuntimeError):
    """Some ranks, which `ranks` names, have found a mistake of their own, and say what it is."""

    def __init__(self, what: str, ranks: Sequence[int]) -> None:
        self.ranks = name_ranks(ranks)
        super().__init__(f"{what and f'{what}: '}{self.ranks} raised an error")


def job_values() -> dict[str, str]:
    """Returns what must be equal on the ranks of any job: versions, and settings."""
    return {
        "the version of axonn_ext": __version__,
        "the version of torch": torch.__version__,
        **settings.load().shared(),
    }


def meet(
    store: Store, rank: int, members: Sequence[int], values: Mapping[str, str] | None, *,
    what: str = "", patience: timedelta | None = None,
) -> None:  # fmt: skip
    """Returns when all members are here and have equal values, by name.

    All members must call it equally often. members: ranks, in the same order everywhere. values:
    None says that this rank has found a mistake; it then raises nothing but RanksMissing. what: the
    caller, for messages. patience: default AXONN_TIMEOUT_SECONDS.

    Raises, on every rank that comes:
        RanksDiffer: names the keys, their values, and the ranks that have them.
        RanksFailed: a rank has found a mistake.
        RanksMissing: ranks do not come, which it names.
        DistNetworkError: the process that serves the store has ended.
    """
    if len(members) == 1:
        return
    # Nobody comes to the next meeting before all have come to this one.
    number = (store.add("comers", 1) - 1) // len(members)
    here = PrefixStore(f"meeting/{number}", store)
    word = _FAILED if values is None else _digest(values)
    here.set(_key(rank), word)
    if here.compare_set("first", "", word).decode() != word:
        here.add("others", 1)
    if here.add("arrived", 1) == len(members):
        here.set("verdict", _said(here, members) if here.add("others", 0) else word)
    verdict = _wait(here, "verdict", members, patience or _timeout(), what)
    if values is None or verdict == word:
        return
    groups = [(said, _ranks_of(runs)) for said, runs in json.loads(verdict)]
    failed = [rank for said, ranks in groups if said == _FAILED for rank in ranks]
    if failed:
        raise RanksFailed(what, failed)
    if here.add(f"told/{word}", 1) == 1:
        here.set(f"values/{word}", json.dumps(values))
    problems = _differences(_read(here, groups[:MOST_SAID], what))
    if rest := [rank for _, ranks in groups[MOST_SAID:] for rank in ranks]:
        problems.append(f"{name_ranks(rest)} differ from these, and from each other")
    raise RanksDiffer(what, problems)


def same_in_world(
    values: Mapping[str, str] | None, *, what: str, ranks: Sequence[int] | None = None
) -> None:
    """Does what `meet` does among these ranks of torch.distributed's world; default all.

    Collectives: none; it uses the store of the default group.
    """
    world = dist.group.WORLD
    assert world is not None, "needs an initialised process group"
    if dist.get_backend() == "fake":  # torch's backend without peers, as fake tensors use it
        return
    members = range(world.size()) if ranks is None else ranks
    name = hashlib.sha256(json.dumps([what, *members]).encode()).hexdigest()[:16]
    store = PrefixStore(f"axonn/{name}", world.get_group_store())
    meet(store, world.rank(), members, values, what=what)


def name_ranks(ranks: Iterable[int]) -> str:
    """Returns "rank 1", or "ranks 0, 2-7"."""
    runs = _runs_of(ranks)
    names = [name for run in runs for name in _names_of(*run)]
    is_one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank{'' if is_one else 's'} {first_of(names, _MOST_RANGES)}"


def _names_of(first: int, last: int) -> list[str]:
    return [f"{first}-{last}"] if last - first > 1 else [*map(str, range(first, last + 1))]


def _runs_of(ranks: Iterable[int]) -> list[list[int]]:
    """Returns the first and the last rank of each run of ranks that follow each other."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def _ranks_of(runs: Iterable[Sequence[int]]) -> list[int]:
    return [rank for first, last in runs for rank in range(first, last + 1)]


def _digest(values: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def _key(rank: int) -> str:
    return f"word/{rank}"


def _timeout() -> timedelta:
    return timedelta(seconds=settings.load().timeout_seconds)


def _wait(store: Store, key: str, members: Sequence[int], patience: timedelta, what: str) -> str:
    if not comes(store, [key], patience):
        late = [rank for rank in members if not store.check([_key(rank)])]
        who = name_ranks(late) if late else "another rank, which has come and gone"
        raise RanksMissing(
            f"{what and f'{what}: '}no word of {who} after {patience.total_seconds():g} s "
            "(AXONN_TIMEOUT_SECONDS)"
        )
    return store.get(key).decode()


def _said(store: Store, members: Sequence[int]) -> str:
    """Returns the words of all ranks as JSON, the most frequent first, with the runs of ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, word in zip(members, store.multi_get([*map(_key, members)]), strict=True):
        ranks_of.setdefault(word.decode(), []).append(rank)
    groups = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1][0]))
    return json.dumps([[word, _runs_of(ranks)] for word, ranks in groups])


def _read(
    store: Store, groups: Sequence[tuple[str, list[int]]], what: str
) -> list[tuple[list[int], dict[str, str]]]:
    """Returns the ranks and values of each group of ranks that say the same."""
    return [
        (ranks, json.loads(_wait(store, f"values/{word}", ranks, _timeout(), what)))
        for word, ranks in groups
    ]


def _differences(said: Sequence[tuple[list[int], Mapping[str, str]]]) -> list[str]:
    """Returns a sentence for each key whose values differ; the largest group's comes last."""
    keys = dict.fromkeys(key for _, values in said for key in values)
    found = []
    for key in keys:
        ranks_of: dict[str, list[int]] = {}
        for ranks, values in said:
            ranks_of.setdefault(values.get(key, _NOT_SET), []).extend(ranks)
        if len(ranks_of) > 1:
            largest = max(ranks_of.values(), key=lambda ranks: (len(ranks), -min(ranks)))
            groups = sorted(ranks_of.items(), key=lambda item: (item[1] is largest, min(item[1])))
            common = _common(list(ranks_of))
            *others, most = [f"{_shown(value, common)} on {name_ranks(r)}" for value, r in groups]
            found.append(f"{key} is {', '.join(others)}, but {most}")
    more = len(found) - MOST_KEYS
    return found[:MOST_KEYS] + ([f"and {more} other values differ"] if more > 0 else [])


def _common(values: Sequence[str]) -> int:
    """Returns the number of characters with which all values begin."""
    letters = enumerate(zip(*values, strict=False))
    return next((i for i, found in letters if len(set(found)) > 1), min(map(len, values)))


def _shown(value: str, common: int) -> str:
    """Returns a value for a message; of a long one, what comes after its common beginning."""
    if len(value) <= MAX_SHOWN or common <= _BEFORE:
        return clipped(value)
    return f"... {clipped(value[common - _BEFORE :])}"
