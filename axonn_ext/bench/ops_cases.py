"""The ops to time, each in our way and in torch's, and the checks that come first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from axonn_ext import ops  # noqa: F401  (registers torch.ops.axonn)
from axonn_ext.calibrate.this_machine import DTYPES

OURS, TORCH = "axonn_ext", "torch"
WIDTH = 1024  # of the matrix that is filled
SAMPLE = 1 << 20  # elements at either end that are checked
SIGMAS = 6  # tolerance of a mean of random numbers
SEED = 0


@dataclass(frozen=True)
class Sizes:
    """What is timed: the sizes, the dtype by its short name, and where.

    elements: of all slots together, and of the filled tensor.
    """

    elements: int
    slots: int
    dtype: str
    device: str

    @property
    def width(self) -> int:
        """The bytes of an element."""
        return DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Way:
    """One way to compute an op.

    call         computes it once
    moved_bytes  the bytes that it must at least read and write
    problem      computes it and returns the problem, or ""; called before anything is timed
    """

    call: Callable[[], object]
    moved_bytes: int
    problem: Callable[[], str]


@dataclass(frozen=True)
class OpCase:
    """An op in one shape; ways: OURS and TORCH, in this order."""

    op: str
    shape: dict[str, int]
    dtype: str
    ways: dict[str, Way]


def reduce_case(sizes: Sizes) -> OpCase:
    """Returns the sum over slots [W, N], W N = elements, as in fused reduce-scatters."""
    count = max(1, sizes.elements // sizes.slots)
    slots = torch.empty(sizes.slots, count, dtype=DTYPES[sizes.dtype], device=sizes.device)
    slots.normal_(generator=torch.Generator(sizes.device).manual_seed(SEED))

    def problem(call: Callable[[], Tensor]) -> str:
        return sum_problem(call(), slots)

    calls: dict[str, Callable[[], Tensor]] = {
        OURS: partial(torch.ops.axonn._reduce_slots, slots), TORCH: partial(slots.sum, 0),
    }  # fmt: skip
    moved = slots.nbytes + count * sizes.width
    ways = {name: Way(call, moved, partial(problem, call)) for name, call in calls.items()}
    return OpCase("reduce", {"W": sizes.slots, "N": count}, sizes.dtype, ways)


def sum_problem(got: Tensor, slots: Tensor) -> str:
    """Returns why a sum over slots [W, N] is wrong at its ends, compared with float64."""
    worst = 0.0
    for part in (slice(0, SAMPLE), slice(-SAMPLE, None)):
        want = slots[:, part].double().sum(0)
        error = (got[part] - want).abs().max() / want.abs().max()
        worst = max(worst, float(error.nan_to_num(nan=torch.inf)))
    # One rounding to the dtype, after W in fp32.
    limit = torch.finfo(slots.dtype).eps + len(slots) * 1e-7
    return "" if worst <= limit else f"a relative error of {worst:.1e}, above {limit:.1e}"


def fill_case(distribution: str, sizes: Sizes) -> OpCase:
    """Returns the initial values of a parameter [M, N], normal or uniform, from Philox."""
    shape = [max(1, sizes.elements // WIDTH), WIDTH]
    out = torch.empty(shape, dtype=DTYPES[sizes.dtype], device=sizes.device)
    generator = torch.Generator(sizes.device).manual_seed(SEED)

    def fill(target: Tensor, first_row: int) -> None:
        torch.ops.axonn.fill_random_(
            target, shape, [first_row, 0], "weight", SEED, distribution, 0.0, 1.0
        )

    def problem_of_ours() -> str:
        fill(out, 0)
        last = torch.empty_like(out[-1:])
        fill(last, shape[0] - 1)
        if not torch.equal(last, out[-1:]):
            return "a row that is filled separately has other values than in the whole"
        return moments_problem(out, distribution)

    def problem_of_torchs() -> str:
        torchs()
        return moments_problem(out, distribution)

    fills = {"normal": out.normal_, "uniform": out.uniform_}
    torchs = partial(fills[distribution], generator=generator)
    ways = {
        OURS: Way(partial(fill, out, 0), out.nbytes, problem_of_ours),
        TORCH: Way(torchs, out.nbytes, problem_of_torchs),
    }
    return OpCase(f"fill-{distribution}", {"M": shape[0], "N": WIDTH}, sizes.dtype, ways)


def moments_problem(values: Tensor, distribution: str) -> str:
    """Returns why values are not from N(0, 1), or from U(0, 1), by mean and standard deviation."""
    sample = values.flatten()[-SAMPLE:].double()
    mean, deviation = (0.0, 1.0) if distribution == "normal" else (0.5, 12**-0.5)
    # A standard deviation errs less than a mean does, but values are rounded as well.
    limit = SIGMAS * deviation * sample.numel() ** -0.5 + torch.finfo(values.dtype).eps / 8
    found_mean, found_deviation = float(sample.mean()), float(sample.std(correction=0))
    if abs(found_mean - mean) <= limit and abs(found_deviation - deviation) <= limit:
        return ""
    return (
        f"mean {found_mean:.4f} and standard deviation {found_deviation:.4f}, expected {mean:.4f} "
        f"and {deviation:.4f} within {limit:.4f}"
    )


CASES: dict[str, Callable[[Sizes], OpCase]] = {
    "reduce": reduce_case,
    "fill-normal": partial(fill_case, "normal"),
    "fill-uniform": partial(fill_case, "uniform"),
}
