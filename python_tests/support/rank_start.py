"""What a rank of the tests does first; nothing here imports torch."""

from __future__ import annotations

import gc
from typing import Any


def serve_rank(*args: Any) -> None:
    """Imports what `worker_pool.serve_rank` needs, and calls it.

    Torch is half a million objects, through which Python's collector would look again and again
    as they are made: a quarter of a rank's start.
    """
    gc.disable()
    import worker_pool

    gc.freeze()
    gc.enable()
    worker_pool.serve_rank(*args)
