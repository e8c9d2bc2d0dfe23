"""What a rank of the tests does first. To import this module does not import torch."""

from __future__ import annotations

import gc
from multiprocessing.connection import Connection


def start_rank(rank: int, world_size: int, port: int, pipe: Connection, device: str) -> None:
    """Imports what `worker_pool.serve_rank` needs, and calls it.

    Torch is a quarter of a million objects, through which Python's collector would look again and
    again as they are made: a fifth of a rank's start.
    """
    gc.disable()
    import worker_pool  # imports torch

    gc.freeze()
    gc.enable()
    worker_pool.serve_rank(rank, world_size, port, pipe, device)
