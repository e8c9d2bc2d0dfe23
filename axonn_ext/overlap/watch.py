"""How ranks report to each other, through the c10d store, when a collective fails or hangs."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import deque
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch.distributed import DistError, Store

from axonn_ext import _C
from axonn_ext.ranks.grid import AxisGroup

GROUP_PREFIX = "overlap/"  # before a group's name, marks the collectives of a watch
POLL_SECONDS = 0.25  # how often waiting ranks check whether a peer has failed
ANSWER_SECONDS = 4.0  # how long a failed rank waits for its peers' states
_REMEMBERED = 64


class CommunicationError(RuntimeError):
    """A collective failed, took too long, or differs from the one that other ranks issued.

    The message names the axis, the collective, the parameter, the sequence number, and the ranks
    that are behind, differ or do not answer.
    """


@dataclass(frozen=True)
class RankState:
    """The number of collectives a rank has issued on an axis, and the recent ones by number."""

    num_issued: int
    recent: dict[int, str]
    problem: str


class Watch:
    """Follows the collectives of one axis of one orchestrator, for errors and their messages.

    All ranks of the axis must make their watches in the same order.
    """

    def __init__(self, axis: AxisGroup, *, timeout_s: float, compare: bool) -> None:
        self.axis = axis.axis
        self.timeout_s = timeout_s
        self.compares = compare
        self._group, self._name = axis.process_group, axis.name
        self._rank, self._size = axis.rank, axis.size
        store = self._group.get_group_store()
        number = store.add(f"axonn/overlap/made/{self._rank}", 1)
        self._store: Store = dist.PrefixStore(f"axonn/overlap/{number}", store)
        self.num_issued = 0
        self._recent: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self.digest = 0  # a checksum of all signatures so far
        self._process = os.getpid()
        self.siblings: list[Watch] = []  # this rank's watches of other axes; they learn of failures

    def issue(self, signature: str, *, compare: bool) -> None:
        """Notes a collective before it is issued, and compares it with those of the other ranks.

        It is compared only if both `compare` and the watch's own `compares` are set.

        Raises: CommunicationError if another rank issues another collective, or in a fork of the
            rank, where collectives would never end.
        """
        if os.getpid() != self._process:
            raise CommunicationError(
                f"{signature}: process {os.getpid()} is a fork of rank {self._rank} of axis "
                f"{self.axis} and not a rank itself; start processes with 'spawn'"
            )
        sequence = self.num_issued
        self.num_issued += 1
        self._recent.append((sequence, signature))
        self.digest = zlib.crc32(signature.encode(), self.digest)
        if self.compares and compare:
            first = self._store.compare_set(f"issued/{sequence}", "", signature).decode()
            if first != signature:
                raise self.failure(sequence, signature, f"another rank issues {first}")

    @property
    def progress(self) -> tuple[str, int, str]:
        """The group's name, the number of collectives issued so far, and the last of them."""
        last = self._recent[-1][1] if self._recent else ""
        return GROUP_PREFIX + self._name, self.num_issued, last

    def noted_wait(self, sequence: int, signature: str, seconds: float) -> _C.noted_wait:
        """Returns a context in which reports show the program as waiting for a collective.

        seconds: how long it has already waited.
        """
        peers = [peer for peer in range(self._size) if peer != self._rank]
        return _C.noted_wait(
            group=GROUP_PREFIX + self._name, axis=self.axis, call=signature, number=sequence + 1,
            peers=peers, what="may not have issued it", seconds=seconds,
        )  # fmt: skip

    def done(self, sequence: int) -> None:
        """Deletes the store's entry for a collective that every rank has issued."""
        if self.compares and self._rank == 0:
            self._store.delete_key(f"issued/{sequence}")

    def someone_failed(self) -> bool:
        """Whether another rank of the axis has given up."""
        try:
            return self._store.check(["failed"])
        except DistError:
            return True

    def failure(self, sequence: int, signature: str, problem: str) -> CommunicationError:
        """Returns this rank's error, after giving its peers some time to report their states."""
        states = self._exchange(problem)
        ranks = dist.get_process_group_ranks(self._group)
        lines = [
            f"axis {self.axis}, rank {ranks[self._rank]} (ranks {', '.join(map(str, ranks))}): "
            f"{signature}, number {sequence} on this axis: {problem}"
        ]
        for peer, state in states.items():
            if peer != self._rank:
                lines.append(f"  rank {ranks[peer]} {_compared(state, sequence, signature)}")
        return CommunicationError("\n".join(lines))

    def _exchange(self, problem: str) -> dict[int, RankState | None]:
        """Returns each rank's state on this axis; None for a rank that does not answer in time."""
        states: dict[int, RankState | None] = dict.fromkeys(range(self._size))
        try:
            self._post(problem)
            for sibling in self.siblings:
                sibling._post(f"failed on axis {self.axis}: {problem}")
            deadline = time.monotonic() + min(ANSWER_SECONDS, self.timeout_s)
            while None in states.values() and time.monotonic() < deadline:
                for peer in [p for p, state in states.items() if state is None]:
                    if self._store.check([f"state/{peer}"]):
                        states[peer] = _read(self._store.get(f"state/{peer}"))
                time.sleep(POLL_SECONDS / 5)
        except DistError:
            pass  # the process that held the store has ended
        return states

    def _post(self, problem: str) -> None:
        """Tells the ranks of the axis that this rank gives up, with its collectives so far."""
        own = RankState(self.num_issued, dict(self._recent), problem)
        self._store.set(f"state/{self._rank}", json.dumps(asdict(own)))
        self._store.set("failed", "")


def _read(text: bytes) -> RankState:
    values = json.loads(text)
    recent = {int(sequence): signature for sequence, signature in values["recent"].items()}
    return RankState(values["num_issued"], recent, values["problem"])


def _compared(state: RankState | None, sequence: int, signature: str) -> str:
    """Says in words how a peer's state compares with a collective of this rank."""
    if state is None:
        return "gives no answer: it has died, or is busy elsewhere"
    if state.num_issued <= sequence:
        last = state.recent.get(state.num_issued - 1)
        text = f"is behind: it has issued {state.num_issued}"
        return text + (f", the last {last}" if last is not None else "")
    theirs = state.recent.get(sequence)
    if theirs is None:
        return f"is ahead: it has issued {state.num_issued}"
    if theirs != signature:
        return f"differs: its number {sequence} is {theirs}"
    return f"has issued the same; it says: {state.problem}"
