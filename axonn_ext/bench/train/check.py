"""Whether systems train alike: a time means nothing for a step that computes something else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from axonn_ext.bench.train.plan import BF16, FP32
from axonn_ext.bench.train.systems import System

NUM_STEPS = 3

# All in fp32 (eps 1.2e-7), sums in another order. A logit is a dot product of H terms behind some
# ten sums a layer, so logits differ by a few times 10 sqrt(layers) eps; the loss is a mean over
# thousands of them, in which that averages out, but follows the updates: AdamW's first ones have
# the sign of the gradient alone, so elements whose gradient is rounding noise may move either way,
# by the learning rate. Measured: below 1e-6. Forgetting to sum the gradients changes the second
# loss by 1e-3 and more.
LOSS_BOUND = 2e-5
# torch's norm of a matrix adds 1e6 squares in fp32, in as many lanes as the processor has; measured
# difference to a sum by shards: 1.4e-5. A gradient not summed, or averaged twice, is off by half.
NORM_BOUND = 3e-4
# In bf16 (eps 7.8e-3) systems round at different places: autocast keeps the residual stream in
# fp32, we do not, and weights start rounded or not. A logit is off by a few eps relative to its own
# spread, which is small beside a loss of log(vocabulary); a norm averages the same over all
# gradients. A gradient not summed is still off by half.
BF16_LOSS_BOUND = 1e-3
BF16_NORM_BOUND = 2e-2


@dataclass(frozen=True)
class Trace:
    """Losses of the global batch and gradient norms of a system's first steps."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    """How far a system is from the reference, relatively, at worst; `problem` if too far."""

    loss_error: float
    norm_error: float
    problem: str | None


def first_steps(system: System, num_steps: int = NUM_STEPS) -> Trace:
    """Runs a system's first steps; a collective. The trace is equal on every rank: that of rank 0,
    or, where losses are local, their mean."""
    pairs = torch.zeros(num_steps, 2, dtype=torch.float64)
    if system.step is not None:
        for i in range(num_steps):
            step = system.step()
            pairs[i, 0], pairs[i, 1] = step.loss.double(), step.norm.double()
    if system.local_loss:
        dist.all_reduce(pairs)
        pairs /= dist.get_world_size()
    else:
        dist.broadcast(pairs, src=0)
    return Trace(tuple(pairs[:, 0].tolist()), tuple(pairs[:, 1].tolist()))


def compare(trace: Trace, reference: Trace, *, dtype: str = FP32) -> Verdict:
    """The verdict on a trace of a system that multiplies in `dtype`, as the reference does."""
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
    """Relative; infinite for what is not a number."""
    errors = [abs(v - e) / abs(e) for v, e in zip(values, expected, strict=True)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6f}" for value in values)
