"""Searches all ways to run a model on a number of ranks for those that fit and are fastest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice, product
from math import lcm
from typing import NamedTuple

from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.estimate import Estimate, closed_form_s, estimate, pieces_of
from axonn_ext.planner.job import Job, Options, pipeline_violations, violations
from axonn_ext.planner.machine import Machine
from axonn_ext.planner.memory import memory_of
from axonn_ext.spec.grid import GridShape, divisors, grids_of
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import LAYOUTS, Overlap
from axonn_ext.spec.pipeline import SCHEDULES
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.spec.rules import BrokenRule

# So many variants of one grid are simulated. They differ little, and the user asks for a grid.
_VARIANTS_OF_A_GRID = 3
# So many configurations with several stages are simulated at most, each with every schedule; one
# simulation takes about 10 ms.
_PIPELINES_SIMULATED = 12
# With several stages, so many micro-batches for each stage are tried at most.
_MOST_PARTS_PER_STAGE = 16
_MOST_RANKS = 1 << 20
_MOST_SEQUENCES = 1 << 40  # divisors of larger numbers would take long to find
_FLAGS = ("heads_over_y", "save_gathered", "reshard_after_forward", "recompute")
_NO_MEMORY = "does not fit in memory"
_VOCABULARY = "vocab_size not divisible"
# If no grid of a number of ranks is legal, so many smaller numbers are tried.
_SMALLER_TRIED = 64
DEFAULT_MEMORY_FRACTION = 0.95
# How stages run: those with the least time, and 1F1B, which holds less than message_driven.
PIPELINES = (
    PipelineOptions(), PipelineOptions("1f1b"), PipelineOptions("zero_bubble"),
    PipelineOptions("interleaved", chunks=2),
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What the planner is asked for.

    batch_size       the sequences of an optimizer step over all ranks
    fixed            those of `Options` that are given instead of searched, out of heads_over_y,
                     save_gathered, reshard_after_forward, recompute and overlap
    micro_batches    the numbers of micro-batches to try, divisors of the batch; None: all of them
    top              the number of configurations to return, each the best of its grid
    memory_fraction  the part of a rank's usable memory that a configuration may use; less than 1,
                     since the prediction is not exact
    simulate         how many of the best configurations by closed forms are simulated
    max_pipe         the most stages of a pipeline that are tried; 1: no pipelines. With several
                     stages, fewer options are searched, lest it take long: kept inputs, kept
                     weights, layout "replicated" and steps without overlap must be asked for
    pipelines        how stages may run; what is legal and fits is counted with 1F1B alone, if it is
                     one of them, and the others are tried with the best configurations
    """

    model: ModelConfig
    model_name: str
    num_ranks: int
    machine: Machine
    batch_size: int
    dtype: str = "bf16"
    layouts: tuple[str, ...] = LAYOUTS
    fixed: Mapping[str, object] = field(default_factory=dict)
    micro_batches: tuple[int, ...] | None = None
    top: int = 10
    memory_fraction: float = DEFAULT_MEMORY_FRACTION
    simulate: int = 100
    max_pipe: int = 1
    pipelines: tuple[PipelineOptions, ...] = PIPELINES

    def __post_init__(self) -> None:
        for name in ("num_ranks", "batch_size", "top", "simulate", "max_pipe"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise PlannerError(f"{name} must be a whole number >= 1, got {value!r}")
        for name, limit in (("num_ranks", _MOST_RANKS), ("batch_size", _MOST_SEQUENCES)):
            if (value := getattr(self, name)) > limit:
                raise PlannerError(f"{name} must be at most {limit:,}, got {value:,}")
        most = self.machine.max_ranks
        if most is not None and self.num_ranks > most:
            raise PlannerError(
                f"machine {self.machine.name} has {_ranks(self.machine, most)}, got "
                f"num_ranks={self.num_ranks:,}"
            )
        if not 0 < self.memory_fraction <= 1:
            raise PlannerError(
                f"memory_fraction must be above 0 and at most 1, got {self.memory_fraction}"
            )
        if self.dtype not in self.machine.peak_flops:
            known = ", ".join(self.machine.peak_flops)
            raise PlannerError(
                f"machine {self.machine.name} has no peak for dtype {self.dtype!r}, only for "
                f"{known}"
            )
        if not self.pipelines:
            raise PlannerError("pipelines must have at least one PipelineOptions, got none")
        _check_choices(self)

    @property
    def memory_limit(self) -> int:
        """The bytes that a rank may use."""
        return int(self.machine.usable_bytes * self.memory_fraction)


def _check_choices(request: Request) -> None:
    """Raises PlannerError for options that cannot be tried or fixed."""
    layouts, fixed = request.layouts, request.fixed
    if not layouts or not set(layouts) <= set(LAYOUTS):
        raise PlannerError(f"layouts must be some of {', '.join(LAYOUTS)}, got {layouts!r}")
    unknown = set(fixed) - {*_FLAGS, "overlap"}
    if unknown:
        known = ", ".join((*_FLAGS, "overlap"))
        raise PlannerError(f"fixed may hold {known}, got {', '.join(sorted(unknown))}")
    for name, value in fixed.items():
        if name in _FLAGS and not isinstance(value, bool):
            raise PlannerError(f"fixed: {name} must be True or False, got {value!r}")
        if name == "overlap" and not (value is None or isinstance(value, Overlap)):
            raise PlannerError(f"fixed: overlap must be None or an Overlap, got {value!r}")
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


@dataclass(frozen=True)
class Plan:
    """The result of a search.

    configs         at most `top` configurations, the best first, each the best of its grid
    rejected        reason -> the number of configurations rejected for it
    num_considered  the number of all configurations, legal or not; fits: those that are legal and
                    fit
    """

    request: Request
    configs: tuple[Estimate, ...]
    rejected: Mapping[str, int]
    num_considered: int
    fits: int


class _Candidate(NamedTuple):
    seconds: float
    job: Job


def plan(request: Request) -> Plan:
    """Finds the fastest configurations, by closed forms and, for the best ones, a simulated step.

    The result depends on the request alone. Raises PlannerError, which says what would fit, if
    nothing fits.
    """
    rejected: Counter[str] = Counter()
    found: list[_Candidate] = []
    num_considered = 0
    for job in _jobs(request):
        options = _variants(request, job)
        num_considered += len(options)
        reason = next(violations(job), None)
        if reason is not None:
            rejected[_rule(reason)] += len(options)
            continue
        fitting = _fitting(request, job, options)
        rejected[_NO_MEMORY] += len(options) - len(fitting)
        if fitting:
            pieces = pieces_of(job, request.machine)
            found += [_Candidate(closed_form_s(pieces, v), v) for v in fitting]
    rejected = +rejected  # drops zeros
    if _VOCABULARY in rejected:
        rejected[_padding_hint(request)] = rejected.pop(_VOCABULARY)
    if not found:
        raise PlannerError(_nothing_fits(request, rejected))
    promising = [c.job for c in _most_promising(found, request.simulate)]
    promising += [other for job in promising for other in _other_pipelines(request, job)]
    best = [_estimate(request, job) for job in promising]
    return Plan(
        request, _best_of_each_grid(best)[: request.top], dict(rejected.most_common()),
        num_considered, len(found),
    )  # fmt: skip


def _estimate(request: Request, job: Job) -> Estimate:
    memory = memory_of(job, device=request.machine.device)
    return estimate(job, request.machine, memory)


# --- What there is to choose from ----------------------------------------------------------------


def _jobs(request: Request) -> Iterator[Job]:
    """Yields every grid, layout and number of micro-batches, legal or not; the rest is default."""
    heads = request.fixed.get("heads_over_y")
    most = min(request.max_pipe, request.model.num_layers, request.num_ranks)
    for pipe in (p for p in divisors(request.num_ranks) if p <= most):
        layouts, parts = _choices(request, pipe)
        for grid in grids_of(request.num_ranks, pipe=pipe):
            for layout in layouts:
                for micro_batches in parts:
                    # heads_over_y moves as many bytes; it helps where y does not divide the
                    # sequences.
                    sequences = request.batch_size // micro_batches
                    undivided = grid.y > 1 and sequences % (grid.data * grid.z * grid.y) != 0
                    over_y = layout == "sharded" and bool(undivided if heads is None else heads)
                    options = _options(layout, over_y, request.dtype, micro_batches)
                    if pipe > 1:
                        options = _with_pipeline(options, _first_pipeline(request.pipelines))
                    yield Job(request.model, grid, options, request.batch_size)


def _choices(request: Request, pipe: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the layouts and the numbers of micro-batches that are tried with so many stages."""
    parts = request.micro_batches or tuple(divisors(request.batch_size))
    if pipe == 1:
        return request.layouts, parts
    layouts = ("sharded",) if "sharded" in request.layouts else request.layouts
    if request.micro_batches is None:
        parts = tuple(n for n in parts if pipe <= n <= _MOST_PARTS_PER_STAGE * pipe)
    return layouts, parts


@cache
def _options(layout: str, heads_over_y: bool, dtype: str, micro_batches: int) -> Options:
    return Options(
        layout=layout, heads_over_y=heads_over_y, dtype=dtype, micro_batches=micro_batches
    )


def _variants(request: Request, job: Job) -> tuple[Options, ...]:
    """Returns all values of the options that change neither legality nor products."""
    grid, parts = job.grid, job.options
    variants = _given(
        parts, tuple(request.fixed.items()), splits_linears=grid.x * grid.y > 1,
        splits_weights=grid.z > 1, splits_batch=grid.z * grid.data > 1, in_stages=grid.pipe > 1,
    )  # fmt: skip
    if grid.pipe == 1:
        return variants
    first = _first_pipeline(request.pipelines)
    return tuple(_with_pipeline(options, first) for options in variants)


def _first_pipeline(pipelines: tuple[PipelineOptions, ...]) -> PipelineOptions:
    """Returns how stages run where only one way is looked at: by 1F1B, which holds least."""
    return next((p for p in pipelines if p.schedule == "1f1b"), pipelines[0])


@cache
def _with_pipeline(options: Options, pipeline: PipelineOptions) -> Options:
    return replace(options, pipeline=pipeline)


def _other_pipelines(request: Request, job: Job) -> Iterator[Job]:
    """Yields the job with each other way in which its stages can run and that fits."""
    for pipeline in request.pipelines if job.grid.pipe > 1 else ():
        other = replace(job, options=_with_pipeline(job.options, pipeline))
        if pipeline != job.options.pipeline and next(pipeline_violations(other), None) is None:
            yield from _fitting(request, job, (other.options,))


@cache
def _given(
    options: Options,
    fixed: tuple[tuple[str, object], ...],
    *,
    splits_linears: bool,
    splits_weights: bool,
    splits_batch: bool,
    in_stages: bool,
) -> tuple[Options, ...]:
    """Returns all variants of the options that are not fixed.

    Options that concern only axes of one rank are not varied.
    """
    choices: dict[str, tuple[object, ...]] = {
        "recompute": (False, True),
        "save_gathered": (False, True) if options.sharded and splits_linears else (False,),
        "overlap": (Overlap(), None) if splits_batch else (None,),
        "reshard_after_forward": (True, False) if splits_weights else (True,),
    }
    if in_stages:  # fewer, lest the search take long
        of_overlap: tuple[object, ...] = (Overlap(),) if splits_batch else (None,)
        choices |= {"save_gathered": (False,), "overlap": of_overlap,
                    "reshard_after_forward": (True,)}  # fmt: skip
    choices.update({name: (value,) for name, value in fixed if name in choices})
    variants = (dict(zip(choices, values, strict=True)) for values in product(*choices.values()))
    return tuple(
        replace(options, **v)  # type: ignore[arg-type]
        for v in variants
        # With overlap, the budget of gathered bytes decides instead of reshard_after_forward.
        if v["overlap"] is None
        or v["reshard_after_forward"]
        or "reshard_after_forward" in dict(fixed)
    )


def _fitting(request: Request, job: Job, variants: tuple[Options, ...]) -> list[Job]:
    limit, device = request.memory_limit, request.machine.device
    jobs = (Job(job.model, job.grid, options, job.batch_size) for options in variants)
    return [job for job in jobs if memory_of(job, device=device).total <= limit]


def _rule(violation: BrokenRule | str) -> str:
    """Returns the rule without its numbers, by which rejected configurations are counted."""
    what = violation.what if isinstance(violation, BrokenRule) else violation.split(":")[0]
    return f"{what} not divisible"


def _padding_hint(request: Request) -> str:
    """Returns the rule of the vocabulary, with a size that the smallest broken split divides."""
    size = request.model.vocab_size
    multiple = lcm(128, next(d for d in divisors(request.num_ranks) if size % d))
    return f"{_VOCABULARY} (pad it, e.g. to {-(-size // multiple) * multiple})"


# --- Which of it is best -------------------------------------------------------------------------


def _most_promising(found: list[_Candidate], count: int) -> list[_Candidate]:
    """Returns the fastest candidates by closed forms, only a few of each grid."""
    chosen: list[_Candidate] = []
    of_grid: Counter[GridShape] = Counter()
    num_pipelines = 0
    for candidate in sorted(found, key=_order):
        grid = candidate.job.grid
        if grid.pipe > 1 and num_pipelines == _PIPELINES_SIMULATED:
            continue
        if of_grid[grid] < _VARIANTS_OF_A_GRID:
            of_grid[grid] += 1
            num_pipelines += grid.pipe > 1
            chosen.append(candidate)
        if len(chosen) == count:
            break
    return chosen


def _order(candidate: _Candidate) -> tuple[object, ...]:
    """Returns a sort key: by time, and for equal times the simplest first, so that ranks agree."""
    return (candidate.seconds, *_simplest_first(candidate.job))


def _simplest_first(job: Job) -> tuple[object, ...]:
    options = job.options
    return (
        options.recompute, options.save_gathered, not options.reshard_after_forward,
        options.heads_over_y, options.layout != "sharded", options.micro_batches, job.grid,
        SCHEDULES.index(options.pipeline.schedule), options.pipeline.chunks,
    )  # fmt: skip


def _best_of_each_grid(estimates: list[Estimate]) -> tuple[Estimate, ...]:
    best: dict[GridShape, Estimate] = {}
    for e in sorted(estimates, key=lambda e: (e.step_time_s, *_simplest_first(e.job))):
        best.setdefault(e.job.grid, e)
    return tuple(best.values())


# --- Where nothing fits --------------------------------------------------------------------------


def smallest_that_fits(request: Request, *, least: int = 1) -> int | None:
    """Returns the smallest power of two >= `least` of ranks on which a legal configuration fits.

    Returns None if there is none.
    """
    ranks, most = 1 << (least - 1).bit_length(), _most_ranks(request.machine)
    while ranks <= most:
        if _some_that_fits(replace(request, num_ranks=ranks)) is not None:
            return ranks
        ranks *= 2
    return None


def _some_that_fits(request: Request) -> Job | None:
    """Returns some legal configuration that fits, or None."""
    if not _may_divide(request, request.num_ranks):
        return None
    for job in _jobs(request):
        if next(violations(job), None) is None:
            fitting = _fitting(request, job, _variants(request, job))
            if fitting:
                return fitting[0]
    return None


def _may_divide(request: Request, num_ranks: int) -> bool:
    """Whether a grid of that many ranks may be legal; if not, it is certain that none is.

    In a legal grid x divides the key-value heads, y z the hidden size, and data the batch.
    """
    model = request.model
    divided = model.kv_heads * model.hidden_size * request.batch_size
    stages = range(1, request.max_pipe + 1)
    return any(num_ranks % pipe == 0 and divided % (num_ranks // pipe) == 0 for pipe in stages)


def _nothing_fits(request: Request, rejected: Mapping[str, int]) -> str:
    model, machine = request.model, request.machine
    tried = "; ".join(f"{reason} ({count:,})" for reason, count in rejected.items())
    lacks_memory = _NO_MEMORY in rejected
    each = f" ({request.memory_limit / 1e9:.3g} GB each to use)" if lacks_memory else ""
    text = (
        f"{request.model_name} ({_short(model.num_parameters())} parameters) cannot run on "
        f"{_ranks(machine, request.num_ranks)} of {machine.name}{each} with a batch of "
        f"{request.batch_size:,} sequences: {tried}"
    )
    fewer = None if lacks_memory else _fewer_that_fit(request)
    power = None if lacks_memory else smallest_that_fits(request, least=request.num_ranks)
    if fewer is None and power is None:
        power = smallest_that_fits(request)
    if fewer is not None and power is not None:
        return f"{text}. {fewer:,} or {_ranks(machine, power)} would do"
    if fewer is not None or power is not None:
        return f"{text}. {_ranks(machine, fewer or power or 0)} would do"
    text += f". No power of two of {_unit(machine)}s up to {_most_ranks(machine):,} does: take "
    if lacks_memory:
        return text + "a larger batch, shorter sequences, or a machine with more memory"
    return text + "a batch and a model with more divisors, or a machine with more memory"


def _fewer_that_fit(request: Request) -> int | None:
    """Returns the next smaller number of ranks on which a legal configuration fits, or None."""
    candidates = (n for n in range(request.num_ranks - 1, 0, -1) if _may_divide(request, n))
    for n in islice(candidates, _SMALLER_TRIED):
        if _some_that_fits(replace(request, num_ranks=n)) is not None:
            return n
    return None


def _most_ranks(machine: Machine) -> int:
    return _MOST_RANKS if machine.max_ranks is None else min(machine.max_ranks, _MOST_RANKS)


def _unit(machine: Machine) -> str:
    return "GPU" if machine.device == "cuda" else "rank"


def _ranks(machine: Machine, count: int) -> str:
    """Returns the number of ranks like "1 GPU" or "8 ranks"."""
    return f"{count:,} {_unit(machine)}" + ("" if count == 1 else "s")


def _short(count: int) -> str:
    """Returns a number like "80.2 B" or "3.1 M"."""
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
