"""Rows of logits with labels, and the errors of loss and gradient compared with float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from axonn_ext.nn.loss import IGNORE_INDEX

axonn = torch.ops.axonn
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# (rows, columns): one, odd, near multiples of 16 (vector lanes) and of 2048 (blocks), empty.
SHAPES = [(1, 1), (3, 5), (7, 33), (2, 16), (5, 2047), (2, 2049), (3, 5003), (0, 7)]
KINDS = ("random", "large", "infinite", "equal")


def make_logits(rows: int, columns: int, dtype: torch.dtype, kind: str) -> Tensor:
    """Random logits; "large": about 10^4; "infinite": a third are -inf; "equal": all equal."""
    generator = torch.Generator().manual_seed(rows * 7919 + columns)
    logits = 3 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if kind == "large":
        logits = logits * 3000
    elif kind == "infinite" and columns > 1:
        out = torch.rand(rows, columns, generator=generator) < 0.3
        out[:, 0] = False
        logits = logits.masked_fill(out, -torch.inf)
    elif kind == "equal":
        logits = torch.full_like(logits, 2.5)
    return logits.to(dtype)


def make_labels(logits: Tensor) -> Tensor:
    """Labels whose logits are finite; every third row has none."""
    rows, columns = logits.shape
    generator = torch.Generator().manual_seed(rows + columns)
    labels = torch.randint(columns, (rows,), generator=generator)
    finite = logits.gather(1, labels[:, None])[:, 0] != -torch.inf
    labels = torch.where(finite, labels, 0)
    labels[1::3] = IGNORE_INDEX
    return labels


def reference(logits: Tensor, labels: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """torch's losses in float64, and the gradient of the logits."""
    wide = logits.detach().to(torch.float64, copy=True).requires_grad_()
    losses = functional.cross_entropy(wide, labels.long(), reduction="none")
    (gradient,) = torch.autograd.grad(losses, wide, dy.double())
    return losses.detach(), gradient


def failures(
    got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], dy: Tensor, *, spread: float
) -> list[str]:
    """Errors of (losses, gradient) that rounding does not explain.

    spread: the largest difference between two finite logits of a row.

    The argument of an exponential is rounded to within `spread` ulps, which moves a probability p
    by p |log p| ulps, so by at most one. The sums of blocks and exp itself add a few more. The
    gradient is then rounded to its own dtype, by half an ulp of the value or of the smallest normal
    number. A loss is the difference of two logits and a logarithm.
    """
    losses, gradient = got
    unit = torch.finfo(losses.dtype).eps
    info = torch.finfo(gradient.dtype)
    room = 20 * unit * dy.abs().double().cpu()[:, None]
    half = info.eps / 2 * want[1].abs() + info.smallest_normal * info.eps
    worst_loss = ((losses.cpu() - want[0]).abs() - 20 * unit - 2 * unit * spread).nan_to_num(
        nan=torch.inf
    )
    worst = ((gradient.cpu().double() - want[1]).abs() - room - half).nan_to_num(nan=torch.inf)
    found = []
    if losses.numel() and worst_loss.max() > 0:
        found.append(f"losses are off by {worst_loss.max():.1e} more than rounding")
    if gradient.numel() and worst.max() > 0:
        found.append(f"gradient is off by {worst.max():.1e} more than rounding")
    return found


def spread_of(logits: Tensor) -> float:
    finite = logits.double()[logits != -torch.inf]
    return float(finite.max() - finite.min()) if finite.numel() else 0.0


def op_failures(device: str, dtype: torch.dtype, *, in_place: bool) -> list[str]:
    """The failures of the two ops on one rank, for all shapes and kinds."""
    found = []
    for rows, columns in SHAPES:
        for kind in KINDS:
            logits = make_logits(rows, columns, dtype, kind)
            labels = make_labels(logits)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            dy = torch.randn(rows, generator=torch.Generator().manual_seed(1)).to(wide)
            want = reference(logits, labels, dy)
            x, own_labels = logits.clone().to(device), labels.to(device)
            losses, statistics = axonn.cross_entropy_forward(
                x, own_labels, 0, IGNORE_INDEX, False, "nobody", 1, "auto"
            )
            operands = (x, own_labels, statistics, 0, IGNORE_INDEX)
            if in_place:
                axonn.cross_entropy_backward_(dy.to(device), *operands)
                gradient = x
            else:
                gradient = axonn.cross_entropy_backward(dy.to(device), *operands)
                assert torch.equal(x.cpu(), logits)
            wrong = failures((losses, gradient), want, dy, spread=spread_of(logits))
            found += [f"{rows} x {columns} {kind} {dtype}: {line}" for line in wrong]
    return found
