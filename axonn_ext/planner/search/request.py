"""A request to the planner: model, machine, ranks and the choices to search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.job import Options
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.search.axes import AxisRules
from axonn_ext.spec.files.keys import about, check, key, keys_of
from axonn_ext.spec.grid import GridShape, divisors
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.optimizer import OptimizerOptions
from axonn_ext.spec.parallel import LAYOUTS, Overlap, ParallelConfig
from axonn_ext.spec.pipeline_options import PipelineOptions

MOST_RANKS = 1 << 20
_MOST_SEQUENCES = 1 << 40  # divisors of larger numbers would take long to find
SEARCHED = ("heads_over_y", "save_gathered", "reshard_after_forward", "recompute")
# Pipeline schedules: the fastest ones, and 1F1B, which holds less than message_driven. Weight
# gradients are deferred as far as is allowed, or as fits.
PIPELINES = (
    PipelineOptions(), PipelineOptions(defer_weights=False), PipelineOptions("1f1b"),
    PipelineOptions("zero_bubble"), PipelineOptions("interleaved", chunks=2),
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A request to the planner.

    fixed            the `Options` that are given instead of searched, out of heads_over_y,
                     save_gathered, reshard_after_forward, recompute and overlap: None (without), an
                     Overlap, or "on", whose numbers are searched
    micro_batches    the numbers of micro-batches to try, divisors of the batch; None: all of them
    max_pipe         with several stages, fewer options are searched, to keep the search short; kept
                     inputs, kept weights, layout "replicated" and steps without overlap must be
                     requested
    optimizers       the options of AdamW to try (where its state is, and what is sharded over the
                     data axis), in order of preference among equally fast ones
    pipelines        the schedules to try; legal and fitting configurations are counted only with
                     1F1B, if it is one of them, and the others are tried with the best ones
    axes             the sizes that the axes of a grid may have; other grids are skipped
    """

    model: ModelConfig
    model_name: str
    num_ranks: int = field(metadata=about("number of ranks", int, minimum=1, maximum=MOST_RANKS))
    machine: Machine
    batch_size: int = field(
        metadata=about("sequences per optimizer step", int, minimum=1, maximum=_MOST_SEQUENCES)
    )
    dtype: str = "bf16"
    layouts: tuple[str, ...] = LAYOUTS
    fixed: Mapping[str, object] = field(default_factory=dict)
    micro_batches: tuple[int, ...] | None = None
    top: int = key(10, "number of grids to show, each with its best configuration", minimum=1)
    # Less than 1, since predictions are not exact.
    memory_fraction: float = key(
        0.95, "share of a rank's usable memory to plan for", above=0, maximum=1
    )
    simulate: int = key(
        100, "number of configurations to simulate, the best by closed forms", minimum=1
    )
    max_pipe: int = key(1, "largest number of pipeline stages to try", minimum=1)
    pipelines: tuple[PipelineOptions, ...] = PIPELINES
    optimizers: tuple[OptimizerOptions, ...] = (OptimizerOptions(),)
    axes: AxisRules = field(default_factory=AxisRules)

    def __post_init__(self) -> None:
        try:
            check(self)
        except ValueError as error:
            raise PlannerError(str(error)) from None
        most = self.machine.max_ranks
        if most is not None and self.num_ranks > most:
            raise PlannerError(
                f"machine {self.machine.name} has {in_ranks(self.machine, most)}, got "
                f"num_ranks={self.num_ranks:,}"
            )
        if self.dtype not in self.machine.peak_flops:
            known = ", ".join(self.machine.peak_flops)
            raise PlannerError(
                f"machine {self.machine.name} has no peak for dtype {self.dtype!r}, only for "
                f"{known}"
            )
        if not self.pipelines:
            raise PlannerError("pipelines must have at least one PipelineOptions, got none")
        if not self.optimizers:
            raise PlannerError("optimizers must have at least one OptimizerOptions, got none")
        if any(optimizer.offload != "none" for optimizer in self.optimizers):
            self.machine.check_offload()
        _check_choices(self)

    @property
    def memory_limit(self) -> int:
        """The bytes that a rank may use together with its communicators."""
        return int(self.machine.usable_bytes * self.memory_fraction)

    def memory_limit_on(self, grid: GridShape, *options: Options) -> int:
        """Returns how many bytes a rank may use, without communicators: see Machine."""
        return self.machine.memory_limit_on(grid, *options, fraction=self.memory_fraction)


def _check_choices(request: Request) -> None:
    """Raises PlannerError for options that cannot be tried or fixed."""
    layouts, fixed = request.layouts, request.fixed
    if not layouts or not set(layouts) <= set(LAYOUTS):
        raise PlannerError(f"layouts must be some of {', '.join(LAYOUTS)}, got {layouts!r}")
    keys = {name: keys_of(ParallelConfig)[name] for name in SEARCHED}
    if unknown := fixed.keys() - {*keys, "overlap"}:
        known = ", ".join((*keys, "overlap"))
        raise PlannerError(f"fixed may hold {known}, got {', '.join(sorted(unknown))}")
    for name, value in fixed.items():
        if name == "overlap":
            if value not in (None, "on") and not isinstance(value, Overlap):
                raise PlannerError(
                    f"fixed: overlap must be None, an Overlap or 'on', got {value!r}"
                )
        elif not keys[name].allows(value):
            wanted = keys[name].wanted(value)
            raise PlannerError(f"fixed: {name} must be {wanted}, got {value!r}")
    if request.micro_batches is not None:
        _check_micro_batches(request.micro_batches, request.batch_size)


def _check_micro_batches(micro_batches: tuple[int, ...], batch_size: int) -> None:
    if not micro_batches:
        raise PlannerError("micro_batches must be None or name at least one number, got none")
    for parts in micro_batches:
        if not isinstance(parts, int) or parts < 1:
            raise PlannerError(f"micro_batches must be whole numbers >= 1, got {parts!r}")
        if batch_size % parts:
            of_batch = divisors(batch_size)
            below = max(d for d in of_batch if d < parts)
            above = min((d for d in of_batch if d > parts), default=None)
            near = f"{below:,} does" if above is None else f"{below:,} and {above:,} do"
            raise PlannerError(
                f"micro_batches must divide batch_size={batch_size:,}, got {parts:,} ({near})"
            )


def unit_of(machine: Machine) -> str:
    """Returns what a rank of the machine is called."""
    return "GPU" if machine.device == "cuda" else "rank"


def in_ranks(machine: Machine, count: int) -> str:
    """Returns the number of ranks like "1 GPU" or "8 ranks"."""
    return f"{count:,} {unit_of(machine)}" + ("" if count == 1 else "s")
