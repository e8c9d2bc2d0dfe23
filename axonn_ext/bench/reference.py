"""Checks results against float64 references of the whole inputs, and bounds their errors.

An input element is a function of the input's name and of its place, so every rank can draw any
block of the inputs, and no communication is needed to compute the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axonn_ext import ops  # noqa: F401  (registers torch.ops.axonn)
from axonn_ext.calibrate.measure import Ranks

Outputs = Mapping[str, Tensor]

SEED = 0
# A product with more operations, or with larger operands, is checked only in a sample of random
# rows and columns of each rank's block. In smaller ones, every element is checked.
MAX_CHECKED_OPERATIONS = 1 << 33
MAX_CHECKED_ELEMENTS = 1 << 26  # they take half a GB in float64 on every rank of a host
NUM_SAMPLED = 256


@dataclass(frozen=True)
class Whole:
    """A random matrix with elements from N(0, 1); any rank can draw any block of it."""

    name: str
    num_rows: int
    num_columns: int
    dtype: torch.dtype
    device: str = "cpu"

    @property
    def rows(self) -> range:
        return range(self.num_rows)

    @property
    def columns(self) -> range:
        return range(self.num_columns)

    def block(self, rows: range, columns: range) -> Tensor:
        """Returns the block in the matrix's dtype, equal on any device, since the CPU draws it."""
        drawn = torch.float32 if self.dtype == torch.float16 else self.dtype
        block = torch.empty(len(rows), len(columns), dtype=drawn)
        sizes, offsets = [self.num_rows, self.num_columns], [rows.start, columns.start]
        torch.ops.axonn.fill_random_(block, sizes, offsets, self.name, SEED, "normal", 0.0, 1.0)
        return block.to(self.device, self.dtype)

    def take(self, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
        """Returns any rows and columns, exact in float64."""
        if not isinstance(rows, range):
            return torch.cat([self.take(range(row, row + 1), columns) for row in rows])
        if not isinstance(columns, range):
            return torch.cat([self.take(rows, range(c, c + 1)) for c in columns], dim=1)
        return self.block(rows, columns).double()


@dataclass(frozen=True)
class Expected:
    """A result, or a part of it, in float64, and the relative error that rounding explains."""

    values: Tensor
    limit: float
    rows: Tensor | None = None  # the places of `values` in the result; None: all
    columns: Tensor | None = None

    def error(self, got: Tensor) -> float:
        """Returns the largest error over the largest magnitude; infinite for NaN or bad shapes."""
        got = got.detach()
        if self.rows is not None and self.columns is not None:
            got = got[self.rows.to(got.device)][:, self.columns.to(got.device)]
        if got.shape != self.values.shape:
            return math.inf
        if got.numel() == 0:
            return 0.0
        got = got.to(self.values.device)
        scale = self.values.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
        error = ((got.double() - self.values).abs().max() / scale).item()
        return math.inf if math.isnan(error) else error


@dataclass(frozen=True)
class Verdict:
    """The relative error of the worst of several results, and the allowed error."""

    output: str
    error: float
    limit: float

    @property
    def correct(self) -> bool:
        return self.error <= self.limit

    @property
    def severity(self) -> float:
        return self.error / self.limit


def judge(outputs: Outputs, expected: Mapping[str, Expected], ranks: Ranks) -> Verdict:
    """Returns the verdict on the worst output of all ranks, which must all call this.

    A missing output is wrong.
    """
    names = list(expected)
    own = [
        Verdict(name, e.error(outputs[name]) if name in outputs else math.inf, e.limit)
        for name, e in expected.items()
    ]
    worst = max(range(len(own)), key=lambda i: own[i].severity)
    everyone = ranks.exchange(float(worst), own[worst].error, own[worst].limit)
    verdicts = [Verdict(names[int(i)], error, limit) for i, error, limit in everyone]
    return max(verdicts, key=lambda verdict: verdict.severity)


def round_off(dtype: torch.dtype, terms: int, parts: int = 1) -> float:
    """Returns the error that rounding explains in sums of `terms` products.

    The error is relative to the largest sum. Products are accumulated in fp32 or better, where
    rounding errors add up like a random walk, to sqrt(terms) * eps for terms of the size of the
    result. The factor 4 covers the largest of many elements. bf16 results are also rounded to bf16,
    once at the end and once for each of the `parts` ranks whose partial sums are added. Each
    rounding changes at most eps / 2, which is doubled because a partial sum may be larger than any
    result.
    """
    wide = dtype if dtype == torch.float64 else torch.float32
    limit = 4 * torch.finfo(wide).eps * math.sqrt(terms)
    if dtype != wide:
        limit += torch.finfo(dtype).eps * math.sqrt(1 + parts)
    return limit


def expected_product(
    left: Callable[[Sequence[int]], Tensor],
    right: Callable[[Sequence[int]], Tensor],
    *,
    rows: range,
    columns: range,
    terms: int,
    limit: float,
) -> Expected:
    """Returns the expected block of a product, or a random part of a block that is too large.

    left(rows) and right(columns) are the operands' rows and columns, [rows, terms] and
    [terms, columns], in float64.
    """
    operations, elements = 2 * len(rows) * len(columns) * terms, (len(rows) + len(columns)) * terms
    if operations <= MAX_CHECKED_OPERATIONS and elements <= MAX_CHECKED_ELEMENTS:
        return Expected(left(rows) @ right(columns), limit)
    generator = torch.Generator().manual_seed(SEED)
    chosen_rows, chosen_columns = (
        torch.randperm(len(places), generator=generator)[:NUM_SAMPLED].sort().values
        for places in (rows, columns)
    )
    values = left([rows[i] for i in chosen_rows]) @ right([columns[i] for i in chosen_columns])
    return Expected(values, limit, chosen_rows, chosen_columns)
