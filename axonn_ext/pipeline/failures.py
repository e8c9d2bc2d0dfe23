"""How the ranks of a pipeline wait for each other, and learn that one of them has failed."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistError, Store

from axonn_ext.overlap.watch import CommunicationError

POLL_SECONDS = 0.25  # ranks that wait look this often whether another one has failed


class PipelineError(CommunicationError):
    """A stage failed, a message did not come in time, or a message has another shape."""


class Failures:
    """What the first rank that failed has said, in the c10d store.

    All ranks must make theirs in the same order. timeout_s: how long a rank waits for others.
    """

    def __init__(self, timeout_s: float) -> None:
        assert dist.group.WORLD is not None
        store = dist.group.WORLD.get_group_store()
        number = store.add(f"axonn/pipeline/made/{dist.get_rank()}", 1)
        self._store: Store = dist.PrefixStore(f"axonn/pipeline/{number}", store)
        self._timeout_s = timeout_s
        self.waited_seconds = 0.0

    def tell(self, text: str) -> None:
        """Tells all ranks why this one fails, unless another one was first."""
        # Where the process that held the store has ended, the others notice that, too.
        with contextlib.suppress(DistError):
            self._store.compare_set("failed", "", text)

    def found(self) -> str:
        """Returns what a rank has said; empty if none has failed."""
        try:
            return self._store.get("failed").decode() if self._store.check(["failed"]) else ""
        except DistError:
            return "the process that held the job's store has ended"

    def error(self, text: str) -> PipelineError:
        """Returns the error of this rank, or that of another one that has failed before."""
        time.sleep(POLL_SECONDS)  # the rank that failed first may be about to say so
        return PipelineError(self.found() or text)

    def wait(
        self, done: Callable[[float], bool], what: str | Callable[[], str], *,
        peer: int | None = None, waits: int = 1, idle: bool = True,
    ) -> None:  # fmt: skip
        """Waits until done(seconds), which itself waits up to so many seconds, is true.

        peer: the rank that is waited for, if it is one. waits: how many waits, each as long as one
        may be, may come one after the other. idle: whether the stage has nothing to do meanwhile,
        which `waited_seconds` counts. Raises PipelineError if another rank fails meanwhile,
        or if it takes too long; `what`, or what it returns then, begins the message, which also
        says whom the peer waits for.
        """
        began = time.monotonic()
        try:
            say = what if callable(what) else lambda: what
            self._wait(done, say, peer, waits * self._timeout_s)
        finally:
            self.waited_seconds += (time.monotonic() - began) * idle

    def _wait(
        self, done: Callable[[float], bool], say: Callable[[], str], peer: int | None, limit: float
    ) -> None:
        began, key, posted = time.monotonic(), f"waits/{dist.get_rank()}", False
        while not done(POLL_SECONDS):
            text = self.found()
            if text:
                raise PipelineError(text)
            if peer is not None and not posted:
                with contextlib.suppress(DistError):  # the next look at the store says it
                    self._store.set(key, json.dumps([say(), peer]))
                posted = True
            if time.monotonic() - began > limit:
                text = f"{say()} within {limit:g} s (AXONN_TIMEOUT_SECONDS)"
                raise self.error("; ".join([text, *self._whom_peers_wait_for(peer)]))
        if posted:
            with contextlib.suppress(DistError):
                self._store.delete_key(key)

    def _whom_peers_wait_for(self, peer: int | None) -> Iterator[str]:
        """Follows the waits from rank to rank."""
        seen: set[int] = set()
        with contextlib.suppress(DistError):
            while peer is not None and peer not in seen and self._store.check([f"waits/{peer}"]):
                seen.add(peer)
                what, next_peer = json.loads(self._store.get(f"waits/{peer}"))
                yield f"rank {peer} waits itself: {what}"
                peer = next_peer

    def wait_for(self, work: dist.Work | None, what: str) -> None:
        """Waits for a collective of gloo. Raises PipelineError as `wait` does, or if it fails."""
        assert work is not None

        def done(seconds: float) -> bool:
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError as error:
                if "Operation timed out" not in str(error):  # Work.wait's own
                    raise self.error(f"{what}: {error}") from None
                return False
            return True

        # The others may themselves wait for a message first, whose error says more.
        self.wait(done, f"{what} was not complete", waits=2)
