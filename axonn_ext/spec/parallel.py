"""The options of a run: what they are called, which there are, and which exclude each other."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import MappingProxyType

LAYOUTS = ("sharded", "replicated")
ALGORITHMS = ("auto", "fused", "chunked", "sequential")  # of the fused ops
# By the role of a Linear, the axes (r, s) that split its out and in features; see nn.Linear.
ROLES = MappingProxyType({"expand": ("x", "y"), "contract": ("y", "x")})
# Of gradients that cross an axis together: large enough that a collective's latency does not show,
# small enough not to matter beside a model.
BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is run on a grid; changes no result beyond rounding.

    layout: "sharded" (rows stay scattered between layers) or "replicated" (AxoNN's own).
    heads_over_y: y splits heads, not sequences, in attention ("sharded" only).
    save_gathered: keep a Linear's gathered input for backward instead of gathering again.
    reshard_after_forward: gather weights over z again in backward instead of keeping them.
    recompute: activation checkpointing, block by block.
    algorithm: of the fused ops: "auto", "fused", "chunked" or "sequential".

    Raises ValueError for a layout or an algorithm that there is not, and for heads_over_y without
    "sharded".
    """

    layout: str = "sharded"
    heads_over_y: bool = False
    save_gathered: bool = False
    reshard_after_forward: bool = True
    recompute: bool = False
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        for name, choices in (("layout", LAYOUTS), ("algorithm", ALGORITHMS)):
            check_choice(name, getattr(self, name), choices)
        if self.heads_over_y and self.layout != "sharded":
            raise ValueError("heads_over_y needs layout 'sharded'")

    @property
    def sharded(self) -> bool:
        return self.layout == "sharded"


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

    Raises ValueError for a negative number, and for buckets of no byte.
    """

    prefetch: int = 1
    gathered_bytes: int = 1 << 30
    deferred: int = 2
    bucket_bytes: int = BUCKET_BYTES
    wait_at_once: bool = False

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            least = 1 if option.name == "bucket_bytes" else 0
            if option.name != "wait_at_once" and value < least:
                raise ValueError(f"Overlap: {option.name} must be >= {least}, got {value}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ValueError, naming the option, for a value that is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
