"""The results of a benchmark of the loss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossRow:
    """One way to compute a loss and its gradient, on logits [rows, vocab].

    median_us, iqr_us, min_us  the time of a forward and a backward pass, in microseconds; None if
                               the result was wrong
    copy_us                    the median time of copying the logits, timed in turns with the rest
    floor_us                   the time of reading the logits twice and writing their gradient once,
                               as fast as the copy reads and writes: 3 / 2 of copy_us
    ratio_to_floor             median_us / floor_us
    speedup                    the median of torch-fp32 over this one
    peak_bytes                 the most bytes that are held at once beside the logits, with their
                               gradient
    peak_over_logits           peak_bytes over the bytes of the logits
    rel_error, error_limit     the largest error, against float64, and what rounding explains;
                               rel_error is None if it is infinite
    """

    op: str
    device: str
    dtype: str
    rows: int
    vocab: int
    system: str
    correct: bool
    median_us: float | None
    iqr_us: float | None
    min_us: float | None
    copy_us: float
    floor_us: float
    ratio_to_floor: float | None
    speedup: float | None
    peak_bytes: int
    peak_over_logits: float
    rel_error: float | None
    error_limit: float
    rounds: int
    threads: int
