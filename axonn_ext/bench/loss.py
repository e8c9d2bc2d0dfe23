"""`axonn-ext bench loss`: times cross-entropy, and counts its memory, against torch's in fp32.

Legend: M rows, V columns, on one rank.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from axonn_ext.bench.benchmark import (
    Benchmark,
    SystemRow,
    check_memory,
    columns_in_ms,
    number,
    shared_fields,
    take_turns,
)
from axonn_ext.calibrate.measure import Timing
from axonn_ext.calibrate.this_machine import DTYPES
from axonn_ext.nn import CrossEntropy, goldfish_labels
from axonn_ext.nn.loss import IGNORE_INDEX
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec.goldfish import Goldfish
from axonn_ext.terminal import charts
from axonn_ext.terminal.arguments import whole
from axonn_ext.terminal.charts import BLUE, GREEN, GREY, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, OURS_IN_PLACE, TORCH = "axonn_ext", "axonn_ext-in-place", "torch-fp32"
GOLDFISH = "axonn_ext-goldfish"
SYSTEMS = (TORCH, OURS, OURS_IN_PLACE, GOLDFISH)
COLORS = {TORCH: GREY, OURS: BLUE, OURS_IN_PLACE: GREEN, GOLDFISH: ORANGE}
BLOCK_ELEMENTS = 1 << 24  # per block of the reference: 128 MiB of float64
COPY = "copy"
PASSES = 3  # over the logits: two that read and one that writes
COPY_PASSES = 2
# An exponential in fp32 errs by some 1e-6, including the error of a sum over many columns.
ROUNDING = 1e-5
VOCABULARIES = (50_304, 128_256)  # GPT-2's, rounded up, and Llama 3's
# Copies of the logits at the peak: themselves, a copy, a gradient, and torch's three in fp32.
_FP32_COPIES, _OWN_COPIES = 3, 3


@dataclass(frozen=True)
class Batch:
    """Logits [M, V] and labels [M], in [0, V) or -100."""

    logits: Tensor
    labels: Tensor

    @classmethod
    def draw(cls, rows: int, vocab: int, dtype: torch.dtype, device: str) -> Batch:
        """Returns logits from a normal distribution with standard deviation 3."""
        generator = torch.Generator(device).manual_seed(0)
        logits = torch.empty(rows, vocab, dtype=dtype, device=device)
        logits.normal_(0, 3, generator=generator)
        labels = torch.randint(vocab, (rows,), generator=generator, device=device)
        return cls(logits, labels)

    def goldfish(self) -> Batch:
        """Returns the same logits, with the labels that Goldfish loss leaves of one sequence."""
        tokens = torch.cat([self.labels[:1], self.labels])  # the first one has no label
        return Batch(self.logits, goldfish_labels(tokens, Goldfish()))

    def for_system(self, system: str) -> Batch:
        """Returns the batch with the labels on which a system trains."""
        return self.goldfish() if system == GOLDFISH else self


Outputs = tuple[Tensor, Tensor]  # the mean loss, and the gradient of the logits [M, V]


def bind(system: str, batch: Batch, grid: Grid) -> Callable[[], Outputs]:
    """Returns a call that computes the mean loss and its gradient.

    The calls of OURS_IN_PLACE and GOLDFISH overwrite the batch's logits; the time of a call does
    not depend on their values. GOLDFISH's call also determines which labels are dropped.
    """
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        # fp32 (fp64 for fp64), which a loss needs
        TORCH: lambda x, labels: functional.cross_entropy(
            x if x.dtype == torch.float64 else x.float(), labels
        ),
        OURS: CrossEntropy(grid=grid),
        OURS_IN_PLACE: CrossEntropy(grid=grid, in_place=True),
        GOLDFISH: CrossEntropy(grid=grid, in_place=True),
    }
    loss_of = losses[system]
    leaf = batch.logits.detach().requires_grad_()

    def call() -> Outputs:
        logits = leaf.view_as(leaf)  # not a leaf, as in a model, and in the same memory
        loss = loss_of(logits, batch.for_system(system).labels)
        (gradient,) = torch.autograd.grad(loss, logits)
        return loss.detach(), gradient

    return call


def worst_error(outputs: Outputs, batch: Batch) -> float:
    """Returns the largest relative error, against float64, of the loss and of the gradient.

    The gradient's error is relative to its largest magnitude. NaN counts as an infinite error.
    """
    loss, gradient = outputs
    kept = batch.labels != IGNORE_INDEX
    rows = kept.sum()
    total = torch.zeros((), dtype=torch.float64, device=loss.device)
    off, largest = total.clone(), total.clone()
    for part in _blocks(batch):
        wide, counts = batch.logits[part].double(), kept[part, None]
        labels = batch.labels[part, None].where(counts, 0)
        log_probabilities = wide.log_softmax(1)
        total -= log_probabilities.gather(1, labels).where(counts, 0).sum() / rows
        want = log_probabilities.exp_()
        want.scatter_add_(1, labels, -torch.ones_like(labels, dtype=want.dtype)).div_(rows)
        want *= counts
        largest = torch.maximum(largest, want.abs().amax())
        off = torch.maximum(off, want.sub_(gradient[part]).abs_().amax())
    error = torch.maximum((loss.double() - total).abs() / total.abs(), off / largest)
    return float(error.nan_to_num(nan=torch.inf))


def _blocks(batch: Batch) -> Iterator[slice]:
    rows, vocab = batch.logits.shape
    step = max(1, BLOCK_ELEMENTS // vocab)
    for begin in range(0, rows, step):
        yield slice(begin, begin + step)


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """Returns the most bytes that a call holds at once in addition to those held before it.

    On the CPU, this is what torch's profiler reports. It does not see what threads of other
    libraries, such as gloo's, allocate or free.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


# --- Rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LossRow(SystemRow):
    """One way to compute a loss and its gradient, on logits [rows, vocab].

    copy_us           the median time to copy the logits; the floor is 3 / 2 of it, as the logits
                      are read twice and their gradient is written once
    speedup           the median of torch-fp32 over this one
    peak_bytes        the most bytes held at once besides the logits, including their gradient
    peak_over_logits  peak_bytes over the bytes of the logits
    rel_error, error_limit    the largest error against float64, and the one that rounding explains;
                              rel_error is None if it is infinite
    """

    rows: int
    vocab: int
    copy_us: float
    speedup: float | None
    peak_bytes: int
    peak_over_logits: float
    rel_error: float | None
    error_limit: float


@dataclass(frozen=True)
class Case:
    """What is timed: the sizes, the dtype by its short name, and where."""

    rows: int
    vocab: int
    dtype: str
    device: str


def error_limit(dtype: str) -> float:
    """Returns the error that rounding explains: in the arithmetic, and once in the gradient."""
    eps = torch.finfo(DTYPES[dtype]).eps
    return eps + (1e-12 if dtype == "fp64" else ROUNDING)


def run_case(
    case: Case, grid: Grid, *, rounds: int, on_round: Callable[[], None] = lambda: None
) -> list[LossRow]:
    """Returns a row per system: checks it and counts its memory, then times all in turns."""
    limit = error_limit(case.dtype)
    batch = Batch.draw(case.rows, case.vocab, DTYPES[case.dtype], case.device)
    errors: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for system in SYSTEMS:
        own = Batch(batch.logits.clone(), batch.labels)
        call = bind(system, own, grid)
        errors[system] = worst_error(call(), batch.for_system(system))
        peaks[system] = peak_bytes(call, case.device)
        del own, call
        gc.collect()
    right = [system for system in SYSTEMS if errors[system] <= limit]
    scratch = Batch(batch.logits.clone(), batch.labels)  # overwritten by the in-place call
    calls: dict[str, Callable[[], object]] = {
        COPY: lambda: scratch.logits.copy_(batch.logits),
        **{system: bind(system, scratch, grid) for system in right},
    }
    timings = take_turns(calls, case.device, rounds=rounds, on_round=on_round)
    return [
        _row(case, system, errors[system], peaks[system], timings, rounds) for system in SYSTEMS
    ]


def _row(
    case: Case, system: str, error: float, peak: int, timings: dict[str, Timing[object]],
    rounds: int,
) -> LossRow:  # fmt: skip
    timing, plain = timings.get(system), timings.get(TORCH)
    copy_us, limit = timings[COPY].median_us, error_limit(case.dtype)
    found = f"{error:.1e}" if math.isfinite(error) else "no number"
    problem = f"its relative error is {found}, rounding explains {limit:.1e}"
    return LossRow(
        op="loss",
        device=case.device,
        dtype=case.dtype,
        rows=case.rows,
        vocab=case.vocab,
        system=system,
        problem="" if timing else problem,
        **shared_fields(timing, copy_us * PASSES / COPY_PASSES, rounds),
        copy_us=copy_us,
        speedup=plain.median_us / timing.median_us if timing and plain else None,
        peak_bytes=peak,
        peak_over_logits=peak / (case.rows * case.vocab * DTYPES[case.dtype].itemsize),
        rel_error=error if math.isfinite(error) else None,
        error_limit=limit,
    )


# --- The chart -----------------------------------------------------------------------------------


def plot_rows(rows: Sequence[LossRow], subtitle: str, path: Path) -> None:
    """Draws times over the floor and memory over that of the logits, grouped by vocabulary.

    The whisker of a time is its interquartile range. A wrong result has no time.
    """
    title = f"cross-entropy, forward and backward, {rows[0].rows} rows, {rows[0].dtype}"
    figure = charts.new_figure((9.6, 4.4), title, subtitle)
    times, memory = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.08, right=0.98, top=0.76, bottom=0.11, wspace=0.22)
    _draw(charts.styled(times, "time / floor"), rows, lambda row: row.ratio_to_floor,
          lambda row: (row.iqr_us or 0.0) / row.floor_us / 2)  # fmt: skip
    label = "peak besides the logits / logits"
    _draw(charts.styled(memory, label), rows, lambda row: row.peak_over_logits, lambda row: 0.0)
    charts.add_legend(figure, charts.patches(COLORS), left=0.08, inches=0.7)
    figure.savefig(path)


def _draw(
    axes: Axes, rows: Sequence[LossRow], value_of: Callable[[LossRow], float | None],
    reach_of: Callable[[LossRow], float],
) -> None:  # fmt: skip
    vocabularies = list(dict.fromkeys(row.vocab for row in rows))
    pitch = len(SYSTEMS) + 1
    for row in rows:
        x = vocabularies.index(row.vocab) * pitch + SYSTEMS.index(row.system)
        if (value := value_of(row)) is not None:
            charts.draw_bar(
                axes, x, value, f"{value:.2f}", color=COLORS[row.system], reach=reach_of(row)
            )
    middle = (len(SYSTEMS) - 1) / 2
    axes.set_xticks([i * pitch + middle for i in range(len(vocabularies))],
                    [f"{vocab:,} columns" for vocab in vocabularies], fontsize=9)  # fmt: skip
    axes.margins(y=0.12)


# --- The command ---------------------------------------------------------------------------------


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rows", type=whole(), default=1024, metavar="N",
        help="number of rows of the logits (default: %(default)s)")  # fmt: skip
    add("--vocab", type=whole(), nargs="+", default=list(VOCABULARIES), metavar="N",
        help="numbers of columns of the logits (default: 50304 128256)")  # fmt: skip


def _check(args: argparse.Namespace) -> None:
    width = _OWN_COPIES * DTYPES[args.dtype].itemsize + _FP32_COPIES * 4
    for vocab in args.vocab:
        what = f"--rows {args.rows} --vocab {vocab}"
        check_memory(what, args.rows * vocab * width, args.device)


def _run(args: argparse.Namespace, on_round: Callable[[], None]) -> Iterator[list[LossRow]]:
    grid = Grid()
    for vocab in dict.fromkeys(args.vocab):
        case = Case(args.rows, vocab, args.dtype, args.device)
        yield run_case(case, grid, rounds=args.rounds, on_round=on_round)


LOSS: Benchmark[LossRow] = Benchmark(
    "loss", "time and memory of cross-entropy, against torch's in fp32",
    description="""\
Times the loss of a batch of logits and its gradient, on one rank. Ours reads the logits in their
own dtype and writes the gradient to new memory or over the logits, the latter also with Goldfish
loss; torch's works on an fp32 copy of all logits. All take turns. Next to the time is the peak
memory of each in addition to the logits. Results are compared with float64; a wrong one gets no
time, and the exit status is 1. docs/benchmarks.md explains the numbers.""",
    epilog="""\
examples:
  axonn-ext bench loss
  axonn-ext bench loss --rows 4096 --vocab 128256 --dtype fp32 --threads 0 --json loss.json
""",
    operands="logits",
    columns={
        "": lambda row: row.system,
        **columns_in_ms(1),
        "x floor": lambda row: number(row.ratio_to_floor),
        "vs torch": lambda row: number(row.speedup),
        "peak MB": lambda row: number(row.peak_bytes / 1e6, 1),
        "x logits": lambda row: number(row.peak_over_logits),
        "error": lambda row: "no number" if row.rel_error is None else f"{row.rel_error:.1e}",
    },
    title=lambda row: f"loss  rows, vocabulary = {row.rows}, {row.vocab}  {row.dtype}, {row.where}",
    legend="ms: forward and backward, median; spread: width of the middle half; floor: two reads "
    "and one write of the logits at the speed of a copy; peak: the most bytes held at once besides "
    "the logits. What the columns mean: docs/benchmarks.md.",
    add_options=_add_options, check=_check, run=_run, draw=plot_rows, dtypes=tuple(DTYPES),
    rounds=20,
)  # fmt: skip
