"""How the ranks of a pipeline learn that one of them has failed, through the c10d store."""

from __future__ import annotations

import contextlib

import torch.distributed as dist
from torch.distributed import DistError, Store

from axonn_ext.overlap.watch import CommunicationError

POLL_SECONDS = 0.25  # ranks that wait look this often whether another one has failed


class PipelineError(CommunicationError):
    """A stage failed, a message did not come in time, or a message has another shape."""


class Failures:
    """What the first rank that failed has said. All ranks must make theirs in the same order."""

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        store = dist.group.WORLD.get_group_store()
        number = store.add(f"axonn/pipeline/made/{dist.get_rank()}", 1)
        self._store: Store = dist.PrefixStore(f"axonn/pipeline/{number}", store)

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
