"""Checks that all systems train alike; otherwise their times would not be comparable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from axonn_ext.bench.train.plan import BF16, FP32
from axonn_ext.bench.train.systems import System
from axonn_ext.calibrate.measure import Ranks

NUM_STEPS = 3

# In fp32 (eps 1.2e-7), systems only differ in the order of their sums. A logit is a dot product of
# H terms after about ten sums per layer, so logits differ by a few times 10 sqrt(layers) eps. This
# averages out in the loss, which is a mean over thousands of logits. But the loss also depends on
# the updates. AdamW's first updates have the size of the learning rate and the sign of the
# gradient, so elements whose gradients are rounding noise may move in either direction. The
# measured difference is below 1e-6. If the gradients are not summed, the second loss changes by at
# least 1e-3.
LOSS_BOUND = 2e-5
# torch's norm of a matrix adds 1e6 squares in fp32, in as many lanes as the processor has. The
# measured difference from a sum by shards is 1.4e-5. A gradient that is not summed, or is averaged
# twice, is wrong by half.
NORM_BOUND = 3e-4
# In bf16 (eps 7.8e-3), systems round at different places: autocast keeps the residual stream in
# fp32, unlike ours, and weights start rounded or not. A logit is wrong by a few eps relative to the
# spread of logits, which is small compared with a loss of log(vocabulary). A norm averages such
# errors over all gradients. A gradient that is not summed is still wrong by half.
BF16_LOSS_BOUND = 1e-3
BF16_NORM_BOUND = 2e-2


@dataclass(frozen=True)
class Trace:
    """The losses of the global batch and the gradient norms of a system's first steps."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    """The largest relative errors of a system; `problem` says if they are too large."""

    loss_error: float
    norm_error: float
    problem: str | None


def first_steps(system: System, ranks: Ranks, num_steps: int = NUM_STEPS) -> Trace:
    """Runs the first steps of a system; all ranks must call this.

    The trace is equal on every rank. It is that of rank 0 or, if losses are local, their mean.
    """
    pairs = torch.zeros(num_steps, 2, dtype=torch.float64)
    if system.step is not None:
        for i in range(num_steps):
            step = system.step()
            pairs[i, 0], pairs[i, 1] = step.loss.double(), step.norm.double()
    found = torch.tensor(ranks.exchange(*pairs.flatten().tolist()), dtype=torch.float64)
    pairs = (found.mean(0) if system.local_loss else found[0]).unflatten(0, (num_steps, 2))
    return Trace(tuple(pairs[:, 0].tolist()), tuple(pairs[:, 1].tolist()))


def compare(trace: Trace, reference: Trace, *, dtype: str = FP32) -> Verdict:
    """Returns the verdict on a trace; both the system and the reference multiply in `dtype`."""
    loss_bound = BF16_LOSS_BOUND if dtype == BF16 else LOSS_BOUND
    norm_bound = BF16_NORM_BOUND if dtype == BF16 else NORM_BOUND
    loss_error = _largest_error(trace.losses, reference.losses)
    norm_error = _largest_error(trace.norms, reference.norms)
    problem = None
    if not loss_error <= loss_bound:
        problem = f"wrong loss: {_listed(trace.losses)}, expected {_listed(reference.losses)}"
    elif not norm_error <= norm_bound:
        problem = (
            f"wrong gradient norm: {_listed(trace.norms)}, expected {_listed(reference.norms)}"
        )
    return Verdict(loss_error, norm_error, problem)


def _largest_error(values: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest relative error; infinite if a value is not a number."""
    errors = [abs(v - e) / abs(e) for v, e in zip(values, expected, strict=True)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6f}" for value in values)
