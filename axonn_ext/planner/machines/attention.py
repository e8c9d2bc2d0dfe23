"""Predicts how fast fused attention runs, by the length of a sequence and the size of a head."""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from axonn_ext.spec.files.tables import Table

DEFAULT_KERNEL = "default"  # for rates that do not name a kernel


class Rates(NamedTuple):
    """Measured rates of causal attention, forward and backward together.

    flops: flop/s, one row per head dim, one column per sequence length. Only the operations of the
    causal half are counted.
    """

    sequence_lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    flops: tuple[tuple[float, ...], ...]

    def at(self, sequence_length: int, head_dim: int) -> float:
        """Returns the rate, interpolated on logarithmic scales, or that of the nearest point."""
        rows = [_between(self.sequence_lengths, row, sequence_length) for row in self.flops]
        return _between(self.head_dims, rows, head_dim)


@dataclass(frozen=True)
class Attention:
    """The rates of attention on a machine, for the kernel that plans assume.

    rates: dtype -> rates.
    """

    rates: Mapping[str, Rates]
    kernel: str = DEFAULT_KERNEL

    @classmethod
    def flat(cls, flops: Mapping[str, float]) -> Attention:
        """Returns rates that depend only on the dtype."""
        return cls({dtype: Rates((1,), (1,), ((rate,),)) for dtype, rate in flops.items()})

    def flops(self, dtype: str, sequence_length: int, head_dim: int) -> float:
        """Returns flop/s. Raises KeyError for a dtype without rates."""
        return self.rates[dtype].at(sequence_length, head_dim)


def _between(points: Sequence[int], values: Sequence[float], at: int) -> float:
    right = bisect.bisect_left(points, at)
    if right == 0:
        return values[0]
    if right == len(points):
        return values[-1]
    low, high = points[right - 1], points[right]
    share = math.log(at / low) / math.log(high / low)
    return values[right - 1] ** (1 - share) * values[right] ** share


def read_attention(table: Table, dtypes: tuple[str, ...]) -> Attention:
    """Reads the table `attention` of a machine's file, which has a rate for each of `dtypes`.

    A rate is either given as a number or taken from the measured rates of `kernel`. Raises
    InputError naming file and key.
    """
    rows = list(table.tables("measured"))
    kernels = [row.text("kernel") for row in rows]
    kernel = DEFAULT_KERNEL
    if rows:
        kernel = table.one_of("kernel", tuple(dict.fromkeys(kernels)))
    rates: dict[str, Rates] = {}
    for row, name in zip(rows, kernels, strict=True):
        of, found = _read_dtypes(row, dtypes), _read_rates(row)
        row.finish()
        if name == kernel:
            twice = next((dtype for dtype in of if dtype in rates), None)
            if twice is not None:
                raise row.error("dtypes", f"an array without {twice}, whose rates are known")
            rates |= dict.fromkeys(of, found)
    others = tuple(dtype for dtype in dtypes if dtype not in rates)
    flat = {dtype: table.positive(dtype) for dtype in others}
    table.finish()
    return Attention({**rates, **Attention.flat(flat).rates}, kernel)


def _read_dtypes(row: Table, dtypes: tuple[str, ...]) -> list[str]:
    names = row.list("dtypes")
    if not names or not set(map(str, names)) <= set(dtypes):
        raise row.error("dtypes", f"an array of some of {', '.join(dtypes)}")
    return [str(name) for name in names]


def _read_rates(row: Table) -> Rates:
    lengths, sizes = (_read_points(row, key) for key in ("sequence_lengths", "head_dims"))
    rows = row.list("flops")
    whole = len(rows) == len(sizes) and all(
        isinstance(rates, list)
        and len(rates) == len(lengths)
        and all(type(rate) in (int, float) and 0 < rate <= sys.float_info.max for rate in rates)
        for rates in rows
    )
    if not whole:
        raise row.error(
            "flops",
            f"an array of {len(sizes)} arrays, one for each of head_dims, of {len(lengths)} "
            "positive numbers, one for each of sequence_lengths",
        )
    return Rates(lengths, sizes, tuple(tuple(map(float, rates)) for rates in rows))


def _read_points(row: Table, key: str) -> tuple[int, ...]:
    points = row.list(key)
    if not points or not all(type(p) is int and p > 0 for p in points):
        raise row.error(key, "an array of whole numbers >= 1")
    if sorted(set(points)) != points:
        raise row.error(key, "an array of ascending numbers")
    return tuple(points)
