"""Loads the compiled extension and hands it the settings. Everything else imports this first."""

from __future__ import annotations

import torch

from axonn_ext import settings

try:
    from axonn_ext import _C
except ImportError as error:
    raise ImportError(
        "axonn_ext's compiled extension cannot be loaded. Build it against the torch that is "
        f"installed here (torch {torch.__version__}): pip install --no-build-isolation -e ."
    ) from error

_loaded = settings.load()
_C.configure(
    timeout_seconds=_loaded.timeout_seconds,
    symmetric_memory_bytes=_loaded.symmetric_memory_bytes,
)


def symmetric_memory_bytes_in_use() -> int:
    """Bytes of symmetric memory that this rank has used in all of its groups."""
    return int(_C.symmetric_memory_bytes_in_use())
