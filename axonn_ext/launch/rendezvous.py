"""How the processes that a launcher starts on one host meet: in a file that only their user reads.

torchrun's own store listens on all interfaces and asks nobody who they are.
"""

from __future__ import annotations

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "axonn_ext_file"


class FileRendezvous(RendezvousHandler):
    """The rendezvous of a launcher without peers; its processes get a file as their MASTER_ADDR."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id, self._file = parameters.run_id, parameters.endpoint

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self._file, 0))

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Makes BACKEND known to torch's launcher, in this process."""
    rendezvous_handler_registry.register(BACKEND, FileRendezvous)
