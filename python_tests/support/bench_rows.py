"""Made-up rows of benchmark results."""

from __future__ import annotations

from axonn_ext import GridShape
from axonn_ext.bench.results import Row


def row_of(op: str, m: int, algorithm: str, median_us: float | None) -> Row:
    return Row(
        op=op, grid=GridShape(x=2).as_dict(), shape={"M": m, "N": 8, "K": 8}, dtype="bf16",
        options={}, algorithm=algorithm, correct=median_us is not None, median_us=median_us,
        min_us=median_us, iqr_us=None if median_us is None else 0.5, floor_us=1.0,
        floor_iqr_us=0.0, collective_us=1.0, collective_iqr_us=0.0, speedup=1.0,
        ratio_to_floor=median_us, hidden_share=None, overlap_efficiency=None, rel_error=0.0,
        error_limit=1.0, worst_output="y", batches=1, calls_per_batch=1, threads=1,
    )  # fmt: skip
