"""Measures how long ops have waited for other ranks."""

from __future__ import annotations

from axonn_ext.kernels import extension


def waited_seconds() -> dict[str, float]:
    """Returns the seconds that this process has waited for peers inside ops so far.

    The keys are the c10d names of the groups. A value only grows while its group lives, so take
    differences. In shared memory a wait counts from the moment it stops spinning, after some
    microseconds. Waits for c10d's collectives count in full; on a GPU they are next to nothing,
    because there the stream waits instead of the process.
    """
    return extension.waited_seconds()
