"""What a rank of the tests does first. To import this module does not import torch."""

from __future__ import annotations

import gc
import os
from multiprocessing.connection import Connection


def start_rank(
    rank: int, world_size: int, port: int, pipe: Connection, device: str, variables: dict[str, str]
) -> None:
    """Imports what `worker_pool.serve_rank` needs, and calls it, with these environment variables.

    Torch is a quarter of a million objects, through which Python's collector would look again and
    again as they are made: a fifth of the start of a rank that is no fork.
    """
    os.environ.clear()
    os.environ.update(variables)
    gc.disable()
    import worker_pool  # imports torch

    gc.freeze()
    gc.enable()
    worker_pool.serve_rank(rank, world_size, port, pipe, device)
