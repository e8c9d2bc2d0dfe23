"""The options of a run: their names, their values, and which of them exclude each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from axonn_ext.spec.files.keys import check, key
from axonn_ext.spec.recompute import EXPECTED, Recomputation, is_policy, recomputation_of

LAYOUTS = ("sharded", "replicated")
ALGORITHMS = ("auto", "fused", "chunked", "sequential")  # how the fused ops can run
# The role of a Linear -> the axes (r, s) that split its out and in features; see nn.Linear.
ROLES = MappingProxyType({"expand": ("x", "y"), "contract": ("y", "x")})
COMMUNICATORS = ("auto", "own", "c10d")  # the transports of collectives on GPUs
# The size of a bucket of gradients that one collective sums. At this size, the latency of the
# collective does not matter, nor does the bucket's memory relative to a model's.
BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is run on a grid. No option changes a result beyond rounding.

    Raises ValueError, which names the option, for an illegal value, and for heads_over_y without
    "sharded".
    """

    layout: str = key(
        "sharded", "layout of activations: sharded (rows), or replicated as in AxoNN",
        choices=LAYOUTS,
    )  # fmt: skip
    heads_over_y: bool = key(
        False, "split attention heads over y instead of sequences; only for layout sharded"
    )
    save_gathered: bool = key(False, "keep gathered inputs for backward; takes more memory")
    reshard_after_forward: bool = key(
        True, "free gathered weights after forward; backward gathers them again over z"
    )
    recompute: str = key(
        "none", "activations to recompute: none, attention, every:K (one of K blocks), every:N/K, "
        "full",
        expected=EXPECTED, accepts=is_policy,
    )  # fmt: skip
    algorithm: str = key(
        "auto", f"algorithm of the fused ops: {', '.join(ALGORITHMS)}", choices=ALGORITHMS
    )

    def __post_init__(self) -> None:
        check(self)
        if self.heads_over_y and self.layout != "sharded":
            raise ValueError(f"heads_over_y needs layout 'sharded', got {self.layout!r}")

    @property
    def sharded(self) -> bool:
        return self.layout == "sharded"

    @cached_property
    def recomputation(self) -> Recomputation:
        """The policy that `recompute` names."""
        return recomputation_of(self.recompute)


@dataclass(frozen=True)
class Overlap:
    """How collectives of weights (axis z) and gradients (z, data) overlap with computation.

    Raises ValueError, which names the option, for an illegal value, and for max_ctas with "c10d".
    """

    prefetch: int = key(
        1, "number of weights to gather ahead of use, in the order of the last step", minimum=0
    )
    gathered_bytes: int = key(
        1 << 30, "most bytes of gathered weights to hold, unless those in use take more",
        minimum=0,
    )  # fmt: skip
    deferred: int = key(
        2, "most weight gradients being reduced over z at a time; 0: wait for each at once",
        minimum=0,
    )  # fmt: skip
    bucket_bytes: int = key(BUCKET_BYTES, "bytes of gradients per collective", minimum=1)
    communicators: str = key(
        "auto", "on GPUs: own (NCCL communicators), c10d (the grid's), or auto (own if all can)",
        choices=COMMUNICATORS,
    )  # fmt: skip
    max_ctas: int = key(
        0, "on GPUs: most SMs per collective on own communicators; 0: NCCL chooses", minimum=0
    )

    def __post_init__(self) -> None:
        check(self)
        if self.max_ctas and self.communicators == "c10d":
            raise ValueError(
                f"max_ctas={self.max_ctas} needs communicators 'own' or 'auto', got 'c10d'"
            )

    @property
    def needs_own_communicators(self) -> bool:
        """Whether the options require NCCL communicators of the grid, not c10d's groups."""
        return self.communicators == "own" or self.max_ctas > 0


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ValueError, which names the option, for a value that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
