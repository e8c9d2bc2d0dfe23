"""Measures how Linears compute their products, and the speedup over the library's call.

A choice is the fastest of several measurements, which is partly luck. Therefore the chosen way and
the library's call are measured again, in turns.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from axonn_ext.calibrate.measure import HEAD_START_CYCLES
from axonn_ext.kernels import tuning
from axonn_ext.spec.products import Product

DIRECT = "direct"  # the library's call
LEAST_SPEEDUP = 0.98  # noise may make a choice seem slower than the library's call

# A batch is long compared with the resolution of the clocks, and all its launches are enqueued
# before the GPU's head start ends. The head start has at least 100 us for each launch; the library
# needs about 10, and Triton several times that (a guess).
_BATCH_US, _MAX_CALLS = 2000.0, 50
_CYCLES_PER_CALL = 200_000
_BUDGET_US, _MIN_ROUNDS, _MAX_ROUNDS = 400_000.0, 7, 25


@dataclass(frozen=True)
class ProductRow:
    """The times of a product in microseconds.

    They are None if Linears make no choice because the product is too small (source "small").

    direct_us, winner_us   medians of "direct" and of the choice, measured in turns after the
                           choice; if the choice is "direct", the median by which it was chosen
    speedup                direct_us / winner_us
    median_us              the medians on which the choice was based
    """

    product: Product
    direct_us: float | None
    winner: str
    winner_us: float | None
    speedup: float | None
    source: str
    median_us: dict[str, float]

    @property
    def name(self) -> str:
        """The name of the product, like "dgrad 64,4096,11008 NN"."""
        product = self.product
        return f"{product.product_pass} {sizes(product)} {product.layout}"


def sizes(product: Product) -> str:
    return f"{product.m},{product.n},{product.k}"


def measure_product(product: Product, dtype: torch.dtype, device: str) -> ProductRow:
    """Makes the choice for one product, on random operands with the layouts of the Linear."""

    def operand(rows: int, columns: int, layout: str) -> Tensor:
        shape = (rows, columns) if layout == "N" else (columns, rows)
        whole = torch.randn(shape, dtype=dtype, device=device)
        return whole if layout == "N" else whole.t()

    a = operand(product.m, product.k, product.layout[0])
    b = operand(product.k, product.n, product.layout[1])
    bias = torch.randn(product.n, dtype=dtype, device=device) if product.bias else None
    choice = tuning.tune_product(a, b, bias=bias, product_pass=product.product_pass)
    if choice is None:
        return ProductRow(product, None, DIRECT, None, None, "small", {})
    us = {DIRECT: choice.median_us[DIRECT]}
    if choice.algorithm != DIRECT:
        about_us = choice.median_us[choice.algorithm]
        us = time_in_turns(a, b, bias, (DIRECT, choice.algorithm), about_us=about_us)
    direct_us, winner_us = us[DIRECT], us[choice.algorithm]
    return ProductRow(
        product, direct_us, choice.algorithm, winner_us, direct_us / winner_us, choice.source,
        choice.median_us,
    )  # fmt: skip


def time_in_turns(
    a: Tensor, b: Tensor, bias: Tensor | None, variants: Sequence[str], *, about_us: float
) -> dict[str, float]:
    """Returns the median microseconds of a @ b (+ bias) for each variant, on the current stream.

    It needs a GPU. about_us: the approximate time of a call, which determines the
    number of calls in a batch.
    """
    num_calls = min(max(math.ceil(_BATCH_US / about_us), 1), _MAX_CALLS)
    batch_us = len(variants) * num_calls * about_us
    rounds = min(max(int(_BUDGET_US / batch_us), _MIN_ROUNDS), _MAX_ROUNDS)
    samples: dict[str, list[float]] = {variant: [] for variant in variants}
    for turn in range(-1, rounds):  # turn -1 warms up
        for variant in variants[::-1] if turn % 2 else variants:

            def calls(variant: str = variant) -> None:
                for _ in range(num_calls):
                    torch.ops.axonn._tuned_mm(a, b, bias, variant)

            seconds = _seconds_on_gpu(calls, num_calls) if a.is_cuda else _seconds_on_cpu(calls)
            if turn >= 0:
                samples[variant].append(seconds / num_calls * 1e6)
    return {variant: statistics.median(values) for variant, values in samples.items()}


def _seconds_on_cpu(calls: Callable[[], None]) -> float:
    began = time.perf_counter()
    calls()
    return time.perf_counter() - began


def _seconds_on_gpu(calls: Callable[[], None], num_calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The host enqueues the calls while the GPU sleeps.
    torch.cuda._sleep(max(HEAD_START_CYCLES, num_calls * _CYCLES_PER_CALL))
    begin.record()
    calls()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class Gain:
    """The speedup (direct_us / winner_us) of the choices over all measured products."""

    num_products: int
    mean_speedup: float  # geometric mean
    worst_speedup: float
    worst: str
    slower: tuple[str, ...]  # products below `LEAST_SPEEDUP`

    def sentence(self) -> str:
        text = (
            f"{self.mean_speedup:.3f} times as fast as direct, the geometric mean of "
            f"{self.num_products} products; {self.worst_speedup:.3f} in the worst ({self.worst}); "
        )
        if not self.slower:
            return f"{text}at least {LEAST_SPEEDUP} in all"
        return f"{text}below {LEAST_SPEEDUP} in {len(self.slower)}: {'; '.join(self.slower)}"


def gain(rows: Sequence[ProductRow]) -> Gain | None:
    """Returns the gain over all rows; None if nothing was measured."""
    found = [(row.speedup, row.name) for row in rows if row.speedup is not None]
    if not found:
        return None
    worst, name = min(found)
    return Gain(
        num_products=len(found),
        mean_speedup=statistics.geometric_mean([speedup for speedup, _ in found]),
        worst_speedup=worst,
        worst=name,
        slower=tuple(name for speedup, name in found if speedup < LEAST_SPEEDUP),
    )
