"""How ranks meet through a c10d store: all must come, and must say the same.

Whatever the number of ranks, each uses the store at most nine times. If they differ, the last one
also reads what all say and groups the ranks that say the same; each reads at most MOST_SAID texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from axonn_ext._version import __version__
from axonn_ext.ranks.stores import BATCH, absent, comes, read
from axonn_ext.spec import settings
from axonn_ext.spec.files.errors import MAX_SHOWN, clipped, first_of

MOST_SAID = 8  # different sets of values that a message shows
MOST_KEYS = 8  # keys that a message names
_MOST_RANGES = 16
_BEFORE = 20  # characters of a long value shown before the first that differs
_FAILED = "failed"  # what a rank says if it has found a mistake itself
_NOT_SET = "not set"
_LOOK = timedelta(seconds=30)  # one rank's look for all takes a few (calculated: 32,768 ranks)


class RanksDiffer(RuntimeError):
    """Values that must be equal on all ranks are not; each of `problems` names one of them."""

    def __init__(self, what: str, problems: Sequence[str]) -> None:
        self.problems = [f"{what}: {problem}" if what else problem for problem in problems]
        super().__init__("\n".join(self.problems))


class RanksMissing(RuntimeError):
    """Some ranks did not come in time."""


class RanksFailed(RuntimeError):
    """The ranks that `ranks` names have each found a mistake, which they report themselves."""

    def __init__(self, what: str, ranks: Sequence[int]) -> None:
        self.ranks = name_ranks(ranks)
        super().__init__(f"{what and f'{what}: '}{self.ranks} raised an error")


def job_values() -> dict[str, str]:
    """Returns the values that must be equal on the ranks of any job: versions and settings."""
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
    None means that this rank has found a mistake; the call then raises only RanksMissing. what: the
    caller, for messages. patience: default AXONN_TIMEOUT_SECONDS.

    Raises, on every rank that comes:
        RanksDiffer: names the keys, their values, and the ranks that have them.
        RanksFailed: a rank has found a mistake.
        RanksMissing: names the ranks that do not come.
        DistNetworkError: the process that serves the store has ended.
    """
    text = _FAILED if values is None else json.dumps(values, sort_keys=True)
    said = said_by_all(store, rank, members, text, what=what, patience=patience)
    if values is None or len(said) == 1:
        return
    failed = [rank for text, ranks in said if text == _FAILED for rank in ranks]
    if failed:
        raise RanksFailed(what, failed)
    groups = [(ranks, json.loads(text)) for text, ranks in said if text is not None]
    problems = _differences(groups)
    problems += [
        f"{name_ranks(ranks)} differ from these, and from each other"
        for text, ranks in said
        if text is None
    ]
    raise RanksDiffer(what, problems)


def said_by_all(
    store: Store, rank: int, members: Sequence[int], text: str, *, what: str = "",
    patience: timedelta | None = None,
) -> list[tuple[str | None, list[int]]]:  # fmt: skip
    """Returns, on every member, each text that members say and the ranks that say it.

    The most common text comes first. After MOST_SAID texts, None stands for all others.
    All members must call it equally often. The arguments and errors are those of `meet`.
    """
    if len(members) == 1:
        return [(text, [*members])]
    # Nobody comes to the next meeting before all have come to this one.
    number = (store.add("comers", 1) - 1) // len(members)
    here = PrefixStore(f"meeting/{number}", store)
    word = hashlib.sha256(text.encode()).hexdigest()[:32]
    here.set(str(rank), word)
    if here.add(f"said/{word}", 1) == 1:
        here.set(f"text/{word}", text)
        here.add("texts", 1)
    if here.add("arrived", 1) == len(members):
        alike = here.add("texts", 0) == 1
        verdict = [] if alike else _said(here, members)
        here.set("verdict", json.dumps(verdict))
    else:
        verdict = _verdict(here, rank, members, text, what, patience)
    groups = [(word, _ranks_of(runs)) for word, runs in verdict]
    if not groups:
        return [(text, [*members])]
    words = [f"text/{word}" for word, _ in groups[:MOST_SAID]]
    texts = [said.decode() for said in here.multi_get(words)]
    said = [(said, ranks) for said, (_, ranks) in zip(texts, groups, strict=False)]
    rest = [rank for _, ranks in groups[MOST_SAID:] for rank in ranks]
    return [*said, (None, rest)] if rest else [*said]


def _verdict(
    here: Store, rank: int, members: Sequence[int], text: str, what: str,
    patience: timedelta | None,
) -> list[tuple[str, list[list[int]]]]:  # fmt: skip
    """Returns the verdict of the last member to arrive: empty if all say the same, else `_said`."""
    patience = patience or timedelta(seconds=settings.load().timeout_seconds)
    if not comes(here, ["verdict"], patience):
        # A rank that reports a mistake waits less long than the others.
        who = "others" if text == _FAILED else name_missing(here, rank, members)
        raise RanksMissing(
            f"{what and f'{what}: '}no word of {who} after {patience.total_seconds():g} s "
            "(AXONN_TIMEOUT_SECONDS)"
        )
    found: list[tuple[str, list[list[int]]]] = json.loads(read(here, "verdict"))
    return found


def name_missing(store: Store, rank: int, members: Sequence[int]) -> str:
    """Names the members that have not set the key of their number.

    The first rank to ask does the look-up, and tells the others.
    """
    key = "missing/ranks"
    if store.add("missing/askers", 1) == 1:
        late = [members[i] for i in absent(store, [*map(str, members)])]
        store.set(key, name_ranks(late) if late else "")
    named = read(store, key).decode() if comes(store, [key], _LOOK) else ""
    if named in ("", name_ranks([rank])):
        return "another rank, which has come and gone"
    return named


def same_in_world(
    values: Mapping[str, str] | None, *, what: str, ranks: Sequence[int] | None = None
) -> None:
    """Calls `meet` among these ranks of torch.distributed's world; default all.

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


def last_of_ranks_that_differ(text: str, *, what: str, ranks: Sequence[int]) -> bool:
    """Returns whether this is the last of the ranks to say a text, and not all have said this one.

    No rank waits. A rank's first texts are compared, then its second ones, and so on.
    Collectives: none; it uses the store of the default group.
    """
    world = dist.group.WORLD
    assert world is not None, "needs an initialised process group"
    if dist.get_backend() == "fake":
        return False
    said = hashlib.sha256(text.encode()).hexdigest()[:32]
    name = hashlib.sha256(json.dumps([what, *ranks]).encode()).hexdigest()[:16]
    store = PrefixStore(f"axonn/{name}", world.get_group_store())
    number = store.add(f"texts of {world.rank()}", 1)
    store.add(f"{number}/{said}", 1)
    if store.add(f"{number}/said", 1) < len(ranks):
        return False
    return bool(store.add(f"{number}/{said}", 0) < len(ranks))


def connect(group: ProcessGroup) -> None:
    """Makes gloo connect the ranks of a new group now, while all are present.

    With TORCH_GLOO_LAZY_INIT gloo would connect two ranks at their first transfer, and a rank may
    then wait five times the group's timeout for one that has died. A barrier connects neighbors in
    rings and trees: 2 log2(n) of n ranks. Without the variable all are connected already; the
    barrier then keeps a rank from closing the group while others still connect.

    Does nothing for other backends. Raises RuntimeError if a rank cannot be reached within
    AXONN_TIMEOUT_SECONDS.
    """
    if group.size() == 1 or dist.get_backend(group) != "gloo":
        return
    seconds = settings.load().timeout_seconds
    try:
        dist.barrier(group, async_op=True).wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        late = f" within {seconds:g} s (AXONN_TIMEOUT_SECONDS)" if "timed out" in text else ""
        ranks = name_ranks(dist.get_process_group_ranks(group))
        raise RuntimeError(f"{ranks} did not all connect{late}: {text}") from None


def name_ranks(ranks: Iterable[int]) -> str:
    """Returns "rank 1", or "ranks 0, 2-7"."""
    runs = _runs_of(ranks)
    names = [name for run in runs for name in _names_of(*run)]
    is_one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank{'' if is_one else 's'} {first_of(names, _MOST_RANGES)}"


def _names_of(first: int, last: int) -> list[str]:
    return [f"{first}-{last}"] if last - first > 1 else [*map(str, range(first, last + 1))]


def _runs_of(ranks: Iterable[int]) -> list[list[int]]:
    """Returns the first and the last rank of each run of consecutive ranks."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def _ranks_of(runs: Iterable[Sequence[int]]) -> list[int]:
    return [rank for first, last in runs for rank in range(first, last + 1)]


def _said(store: Store, members: Sequence[int]) -> list[tuple[str, list[list[int]]]]:
    """Returns the words of all ranks, the most frequent first, with the runs of ranks."""
    ranks_of: dict[str, list[int]] = {}
    for first in range(0, len(members), BATCH):
        batch = members[first : first + BATCH]
        for rank, word in zip(batch, store.multi_get([*map(str, batch)]), strict=True):
            ranks_of.setdefault(word.decode(), []).append(rank)
    groups = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1][0]))
    return [(word, _runs_of(ranks)) for word, ranks in groups]


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
    """Returns the length of the common prefix of all values."""
    letters = enumerate(zip(*values, strict=False))
    return next((i for i, found in letters if len(set(found)) > 1), min(map(len, values)))


def _shown(value: str, common: int) -> str:
    """Returns a value for a message; a long one without its common prefix."""
    if len(value) <= MAX_SHOWN or common <= _BEFORE:
        return clipped(value)
    return f"... {clipped(value[common - _BEFORE :])}"
