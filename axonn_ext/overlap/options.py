"""What is overlapped, and how much memory that may take."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Overlap:
    """How collectives of weights (axis z) and gradients (z, data) run beside computation.

    prefetch        weights gathered ahead of the one in use, in the order that the last step
                    executed; 0: each is gathered when it is needed
    gathered_bytes  of gathered weights that are held, those in use included; more only where what
                    is in use at once takes more by itself
    deferred        weight gradients whose sum over z may be under way at once; 0: each is waited
                    for as soon as it is started
    bucket_bytes    of gradients that cross an axis together
    wait_at_once    every collective is waited for where it is started: the same collectives and
                    the same bits without overlap, for comparison
    """

    prefetch: int = 1
    gathered_bytes: int = 1 << 30
    deferred: int = 2
    bucket_bytes: int = 32 << 20
    wait_at_once: bool = False

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            least = 1 if option.name == "bucket_bytes" else 0
            if option.name != "wait_at_once" and value < least:
                raise ValueError(f"Overlap: {option.name} must be >= {least}, got {value}")
