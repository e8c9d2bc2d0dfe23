"""The options of a run: their names, their values, and which of them exclude each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from axonn_ext.spec.recompute import Recomputation, recomputation_of

LAYOUTS = ("sharded", "replicated")
ALGORITHMS = ("auto", "fused", "chunked", "sequential")  # how the fused ops can run
# The role of a Linear -> the axes (r, s) that split its out and in features; see nn.Linear.
ROLES = MappingProxyType({"expand": ("x", "y"), "contract": ("y", "x")})
COMMUNICATORS = ("auto", "own", "c10d")  # what collectives on GPUs go over
# The size of a bucket of gradients that one collective sums. At this size the latency of the
# collective does not matter, nor does the memory of the bucket compared with that of a model.
BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is run on a grid. No option changes a result beyond rounding.

    layout: "sharded" (rows stay scattered between layers) or "replicated" (AxoNN's own).
    heads_over_y: y splits heads instead of sequences in attention ("sharded" only).
    save_gathered: keep a Linear's gathered input for backward instead of gathering it again.
    reshard_after_forward: gather weights over z again in backward instead of keeping them.
    recompute: which activations are computed again in backward instead of kept (activation
        checkpointing): "none"; "attention": those between the two Linears of each attention;
        "every:K" and "every:N/K": those of the first, or the first N, of each K blocks that a rank
        has; "full": those of all blocks.
    algorithm: how the fused ops run: "auto", "fused", "chunked" or "sequential".

    Raises ValueError for an unknown layout, algorithm or policy of recomputation, and for
    heads_over_y without "sharded".
    """

    layout: str = "sharded"
    heads_over_y: bool = False
    save_gathered: bool = False
    reshard_after_forward: bool = True
    recompute: str = "none"
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        for name, choices in (("layout", LAYOUTS), ("algorithm", ALGORITHMS)):
            check_choice(name, getattr(self, name), choices)
        if self.heads_over_y and self.layout != "sharded":
            raise ValueError("heads_over_y needs layout 'sharded'")
        _ = self.recomputation  # which refuses what is no policy

    @property
    def sharded(self) -> bool:
        return self.layout == "sharded"

    @cached_property
    def recomputation(self) -> Recomputation:
        """What `recompute` names."""
        return recomputation_of(self.recompute)


@dataclass(frozen=True)
class Overlap:
    """How collectives of weights (axis z) and gradients (z, data) overlap with computation.

    prefetch        the number of weights that are gathered ahead of the one in use, in the order
                    in which the last step used them; 0: each is gathered when it is needed
    gathered_bytes  the most bytes of gathered weights that are held at once, those in use included;
                    exceeded only where the weights in use alone take more
    deferred        the number of weight gradients whose sums over z may be under way at once;
                    0: each is waited for as soon as it is started
    bucket_bytes    the bytes of gradients that one collective sums
    wait_at_once    every collective is waited for where it is started, for comparison: collectives
                    and bits are the same, but nothing overlaps
    communicators   on GPUs, what collectives go over: "own", NCCL communicators of axonn_ext;
                    "c10d", the grid's process groups; "auto": own if all ranks can have them
    max_ctas        on GPUs, the most CTAs, and thus SMs, that a collective uses; 0: NCCL chooses.
                    Communicators are then "own"

    Raises ValueError for a negative number, for bucket_bytes=0, for unknown communicators, and for
    max_ctas with "c10d".
    """

    prefetch: int = 1
    gathered_bytes: int = 1 << 30
    deferred: int = 2
    bucket_bytes: int = BUCKET_BYTES
    wait_at_once: bool = False
    communicators: str = "auto"
    max_ctas: int = 0

    def __post_init__(self) -> None:
        for name in ("prefetch", "gathered_bytes", "deferred", "bucket_bytes", "max_ctas"):
            value = getattr(self, name)
            least = 1 if name == "bucket_bytes" else 0
            if value < least:
                raise ValueError(f"Overlap: {name} must be >= {least}, got {value}")
        check_choice("Overlap: communicators", self.communicators, COMMUNICATORS)
        if self.max_ctas and self.communicators == "c10d":
            raise ValueError(
                f"Overlap: max_ctas={self.max_ctas} needs communicators 'own' or 'auto', got 'c10d'"
            )

    @property
    def needs_own_communicators(self) -> bool:
        """Whether c10d's groups would not do."""
        return self.communicators == "own" or self.max_ctas > 0


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ValueError, which names the option, for a value that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
