"""How long ops have waited for other ranks."""

from __future__ import annotations

from axonn_ext import _library


def waited_seconds() -> dict[str, float]:
    """Seconds that this process has waited for peers inside ops so far, by c10d group name.

    Only ever grows while a group lives: take differences. Of shared memory: what waits took beyond
    their first microseconds, in which a rank only looks. Of c10d: the waits for its collectives; on
    a device, whose stream waits instead of the process, next to nothing.
    """
    return _library.waited_seconds()
