"""The options of a run: their names, their values, and which of them exclude each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from axonn_ext.inputs.keys import check, key
from axonn_ext.spec.recompute import EXPECTED, Recomputation, is_policy, recomputation_of

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

    Raises ValueError, which names the option, for a value that is not legal, and for heads_over_y
    without "sharded".
    """

    layout: str = key("sharded", "sharded rows, or AxoNN's own replicated ones", choices=LAYOUTS)
    heads_over_y: bool = key(False, "y splits heads, not sequences, in attention (sharded)")
    save_gathered: bool = key(False, "keep gathered inputs for backward: more memory")
    reshard_after_forward: bool = key(True, "gather weights over z again in backward")
    recompute: str = key(
        "none", "none, attention, every:K (one of K blocks), every:N/K or full",
        expected=EXPECTED, accepts=is_policy,
    )  # fmt: skip
    algorithm: str = key("auto", "how the fused ops run", choices=ALGORITHMS)

    def __post_init__(self) -> None:
        check(self)
        if self.heads_over_y and self.layout != "sharded":
            raise ValueError(f"heads_over_y needs layout 'sharded', got {self.layout!r}")

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

    Raises ValueError, which names the option, for a value that is not legal, and for max_ctas with
    "c10d".
    """

    prefetch: int = key(1, "weights gathered ahead of use, in the last step's order", minimum=0)
    gathered_bytes: int = key(
        1 << 30, "bytes of gathered weights held at a time; more only if those in use take more",
        minimum=0,
    )  # fmt: skip
    deferred: int = key(
        2, "weight gradients under way over z; 0: each is waited for at once", minimum=0
    )
    bucket_bytes: int = key(BUCKET_BYTES, "bytes of gradients in one collective", minimum=1)
    communicators: str = key(
        "auto", "on GPUs: own NCCL communicators; c10d: the grid's; auto: own if all can",
        choices=COMMUNICATORS,
    )  # fmt: skip
    max_ctas: int = key(
        0, "on GPUs: most SMs of a collective, on own communicators; 0: NCCL chooses", minimum=0
    )

    def __post_init__(self) -> None:
        check(self)
        if self.max_ctas and self.communicators == "c10d":
            raise ValueError(
                f"max_ctas={self.max_ctas} needs communicators 'own' or 'auto', got 'c10d'"
            )

    @property
    def needs_own_communicators(self) -> bool:
        """Whether c10d's groups would not do."""
        return self.communicators == "own" or self.max_ctas > 0


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ValueError, which names the option, for a value that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
