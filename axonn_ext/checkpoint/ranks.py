"""How the ranks of a job agree about a checkpoint: in a tree, by small messages in c10d's store.

In a round, each rank waits for its children, at most CHILDREN of them, merges their values with its
own, and passes the result to its parent. Then rank 0 answers all ranks. So a rank uses the store
about twenty times at most, whatever the number of ranks, and no torch.distributed group is made.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store

from axonn_ext.checkpoint.errors import CheckpointError, RanksMissing
from axonn_ext.checkpoint.state import place_in_world
from axonn_ext.ranks.meeting import name_ranks
from axonn_ext.spec import settings

T = TypeVar("T")
CHILDREN = 8
_MOST_ERRORS = 8  # in a message
_MOST_BYTES = 7 << 20  # of a message; c10d's store takes 8 MiB
_LONGEST_NAP, _NAP_OF_A_RANK = 0.25, 1e-4  # seconds between polls; all ranks poll one store
_BEATS = 8  # heartbeats of a busy rank within the timeout


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except DistError as error:
        raise CheckpointError(f"the store of the ranks does not answer: {error}") from None


class Ranks:
    """The ranks that write or read a checkpoint together.

    All ranks must make their instances, and call the methods, in the same order. If a rank neither
    arrives nor calls `beat` for AXONN_TIMEOUT_SECONDS, all others raise an error that names it.

    store: a client used only for these messages; None: a single process.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        self.rank, self.size, self._store = rank, size, store
        self._number, self._round, self._last_answer = 0, 0, ""
        self._beaten = time.monotonic()
        self._patience = settings.load().timeout_seconds

    @classmethod
    @_store_errors()
    def of_world(cls) -> Ranks:
        """All ranks of torch.distributed, or one process. One thread at a time may use them."""
        rank, size = place_in_world()
        if size == 1:
            return cls()
        assert dist.group.WORLD is not None
        store: Store = dist.group.WORLD.get_group_store()
        number = store.add(f"axonn/checkpoint/{rank}", 1)
        # A separate connection: while one thread waits, others cannot use the same one.
        own = store.clone()  # type: ignore[attr-defined, unused-ignore]
        return cls(rank, size, PrefixStore(f"axonn/checkpoint/{number}", own))

    def begin(self) -> None:
        """Begins another save or load, whose messages do not mix with those of earlier ones.

        So a rank that was late is in step with the others again at the next one.
        """
        self._number, self._round = self._number + 1, 0

    @property
    def children(self) -> range:
        """The ranks that report to this one."""
        first = self.rank * CHILDREN + 1
        return range(first, max(first, min(first + CHILDREN, self.size)))

    @_store_errors()
    def reduced(
        self, value: Any, merge: Callable[[Any, Any], Any],
        answer: Callable[[Any], Any] | None = None,
    ) -> Any:  # fmt: skip
        """Returns, on every rank, rank 0's answer to the merged values of all ranks.

        value: JSON. answer: applied on rank 0; default: the merged value itself. Raises
        RanksMissing, on every rank, naming those that do not arrive, and CheckpointError if the
        store does not answer.
        """
        if self._store is None:
            return value if answer is None else answer(value)
        store, here = self._store, f"{self._number}/{self._round}"
        self._round += 1
        said: dict[str, Any] = {"value": value}
        try:
            self._await([f"{here}/{child}" for child in self.children], self.children)
            for child in self.children:
                theirs = _read(store.get(f"{here}/{child}"))
                store.delete_key(f"{here}/{child}")
                _raise_error(theirs)
                said["value"] = merge(said["value"], theirs["value"])
            if self.rank == 0:
                self._raise_given_up()
        except CheckpointError as error:
            said = {"error": str(error), "missing": isinstance(error, RanksMissing)}
        if self.rank:
            _set(store, f"{here}/{self.rank}", said)
            try:
                self._await([f"{here}/all"], [0])
            except RanksMissing as error:
                store.set(self._given_up, str(error))
                raise
            said = _read(store.get(f"{here}/all"))
        else:
            if "error" not in said:
                said["value"] = said["value"] if answer is None else answer(said["value"])
                store.delete_key(self._last_answer)  # all have arrived here, so all have read it
            self._last_answer = f"{here}/all"
            _set(store, self._last_answer, said)
        _raise_error(said)
        return said["value"]

    @property
    def _given_up(self) -> str:
        """The key that a rank sets when it stops waiting for rank 0."""
        return f"{self._number}/given up"

    def _raise_given_up(self) -> None:
        assert self._store is not None
        if self._store.check([self._given_up]):
            raise RanksMissing(self._store.get(self._given_up).decode())

    def _await(self, keys: Sequence[str], ranks: Sequence[int]) -> None:
        """Returns when the ranks have set the keys. Raises RanksMissing, naming the late ones."""
        assert self._store is not None
        lives = {rank: (0, time.monotonic()) for rank in ranks}
        while keys and not self._come(keys):
            self.beat()
            self._raise_given_up()
            now = time.monotonic()
            for key, rank in zip(keys, ranks, strict=True):
                beats, since = self._store.add(f"beats/{rank}", 0), lives[rank]
                if beats != since[0] or self._store.check([key]):
                    lives[rank] = (beats, now)
            if late := [rank for rank, (_, last) in lives.items() if now - last > self._patience]:
                raise RanksMissing(
                    f"no word of {name_ranks(late)} for {self._patience:g} s "
                    "(AXONN_TIMEOUT_SECONDS)"
                )

    def _come(self, keys: Sequence[str]) -> bool:
        """Returns whether the keys are set before the next beat.

        It polls, less and less often: c10d prints a warning for each wait that times out.
        """
        assert self._store is not None
        end, nap = time.monotonic() + self._patience / _BEATS, 0.001
        while not self._store.check(list(keys)):
            if time.monotonic() > end:
                return False
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP + _NAP_OF_A_RANK * self.size, self._patience / 100)
        return True

    def beat(self) -> None:
        """Shows that this rank is still working. Call it between the parts of long work."""
        now = time.monotonic()
        if self._store is not None and now - self._beaten > self._patience / _BEATS / 2:
            with suppress(DistError):  # the next round says so
                self._store.add(f"beats/{self.rank}", 1)
            self._beaten = now

    def agree(self, error: str | None) -> None:
        """Raises CheckpointError on every rank if one has an error: the first one, with its rank.

        An error common to all ranks is raised without a rank.
        """
        own = {} if error is None else {error: [self.rank, 1]}
        errors = self.reduced(own, _merged_errors)
        for text, (rank, count) in sorted(errors.items(), key=lambda item: item[1][0]):
            raise CheckpointError(text if count == self.size else f"rank {rank}: {text}")

    def agreed(self, function: Callable[[], T]) -> T:
        """Returns the function's result on this rank, or raises its error on every rank.

        An OSError or a ValueError becomes a CheckpointError.
        """
        value, error = _tried(function)
        self.agree(error)
        return cast(T, value)

    def told(self, function: Callable[[], Any]) -> Any:
        """Returns, on every rank, the function's result on rank 0, or raises its error."""

        def answer(_: None) -> tuple[Any, str | None]:
            return _tried(function)

        value, error = self.reduced(None, lambda own, _: own, answer)
        if error is not None:
            raise CheckpointError(error if self.size == 1 else f"rank 0: {error}")
        return value


def _tried(function: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return function(), None
    except (CheckpointError, OSError, ValueError) as error:
        return None, str(error)


def _merged_errors(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the first errors, each with its first rank and the number of ranks that have it."""
    merged = dict(one)
    for text, (rank, count) in other.items():
        first, more = merged.get(text, (rank, 0))
        merged[text] = [min(first, rank), more + count]
    return dict(sorted(merged.items(), key=lambda item: int(item[1][0]))[:_MOST_ERRORS])


def _set(store: Store, key: str, said: Mapping[str, Any]) -> None:
    text = zlib.compress(json.dumps(said).encode(), 1)
    if len(text) > _MOST_BYTES:
        problem = f"a message of {len(text)} bytes, more than c10d's store takes"
        text = zlib.compress(json.dumps({"error": problem}).encode())
    store.set(key, text)  # type: ignore[arg-type, unused-ignore]


def _read(text: bytes) -> Any:
    return json.loads(zlib.decompress(text))


def _raise_error(said: Mapping[str, Any]) -> None:
    if "error" in said:
        raise (RanksMissing if said.get("missing") else CheckpointError)(said["error"])
