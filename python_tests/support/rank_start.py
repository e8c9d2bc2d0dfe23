"""The start of a rank of the tests. Importing this module does not import torch."""

from __future__ import annotations

import gc
import os
from multiprocessing.connection import Connection


def start_rank(
    rank: int, world_size: int, port: int, pipe: Connection, device: str, variables: dict[str, str]
) -> None:
    """Calls `worker_pool.serve_rank` with these environment variables.

    Importing torch creates a quarter of a million objects, which Python's garbage collector would
    scan again and again. That takes a fifth of the start of a rank that is not forked.
    """
    os.environ.clear()
    os.environ.update(variables)
    gc.disable()
    import worker_pool  # imports torch

    gc.freeze()
    gc.enable()
    worker_pool.serve_rank(rank, world_size, port, pipe, device)
