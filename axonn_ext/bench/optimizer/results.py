"""The results of a benchmark of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerRow:
    """A step of AdamW over so many elements, with its state in one place.

    median_us, iqr_us, min_us  the time of a step, in microseconds; None if its bits were wrong
    elements_per_ns            elements / median_us, in thousands of millions a second
    vs_torch                   the median, over the rounds, of torch's time over this one's
    pass_us, pass_bytes        the median time of multiplying fp32 numbers in place, where the state
                               is updated, in turns with the rest; what it reads and writes
    moved_bytes                the bytes that a step must read and write there
    floor_us                   the time to move these at the speed of this pass
    ratio_to_floor             median_us / floor_us
    device_bytes               of weights, gradients, masters and moments on the device
    host_bytes, disk_bytes     of masters and moments in host memory, and in files
    """

    op: str
    device: str
    dtype: str
    elements: int
    bucket_elements: int
    system: str
    correct: bool
    median_us: float | None
    iqr_us: float | None
    min_us: float | None
    elements_per_ns: float | None
    vs_torch: float | None
    pass_us: float
    pass_bytes: int
    moved_bytes: int
    floor_us: float
    ratio_to_floor: float | None
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    rounds: int
    threads: int
