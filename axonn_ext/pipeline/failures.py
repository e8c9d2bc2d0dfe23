"""How the ranks of a pipeline wait for each other, and learn of a failure of one of them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistError, Store

from axonn_ext.overlap.watch import CommunicationError

POLL_SECONDS = 0.25  # how often waiting ranks check whether another one has failed


class PipelineError(CommunicationError):
    """A stage failed, or a message did not come in time or has another shape than expected."""


class Failures:
    """Publishes the error of the first rank that fails, through the c10d store.

    All ranks must make their instances in the same order. timeout_s: how long a rank waits for
    others.
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
        # If the process that holds the store has ended, the others notice that, too.
        with contextlib.suppress(DistError):
            self._store.compare_set("failed", "", text)

    def found(self) -> str:
        """Returns the error that a rank has published; empty if none has failed."""
        try:
            return self._store.get("failed").decode() if self._store.check(["failed"]) else ""
        except DistError:
            return "the process that held the job's store has ended"

    def error(self, text: str) -> PipelineError:
        """Returns this rank's error, or that of another rank that has failed before."""
        time.sleep(POLL_SECONDS)  # the rank that failed first may be about to say so
        return PipelineError(self.found() or text)

    def wait(
        self, done: Callable[[float], bool], what: str | Callable[[], str], *,
        peer: int | None = None, waits: int = 1, idle: bool = True,
    ) -> None:  # fmt: skip
        """Waits until done(seconds), which itself waits up to that many seconds, returns True.

        peer: the rank being waited for, if it is a single one. waits: how many timeouts to allow,
        if several waits may follow each other. idle: whether the stage has nothing to do meanwhile;
        `waited_seconds` counts such time. Raises PipelineError if another rank fails meanwhile, or
        if it takes too long; the message begins with `what` (or its result), and also says whom the
        peer waits for.
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
                with contextlib.suppress(DistError):  # the next look at the store reports it
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
                yield f"rank {peer} is waiting, too: {what}"
                peer = next_peer

    def wait_for(self, work: dist.Work | None, what: str) -> None:
        """Waits for a gloo collective. Raises PipelineError as `wait` does, or if it fails."""
        assert work is not None

        def done(seconds: float) -> bool:
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError as error:
                if "Operation timed out" not in str(error):  # Work.wait's own
                    raise self.error(f"{what}: {error}") from None
                return False
            return True

        # The others may themselves be waiting for a message; their error, which says more, comes
        # first.
        self.wait(done, f"{what} was not complete", waits=2)
