"""Cross-entropy over a vocabulary that is split over x. The logits never leave their rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from axonn_ext import collectives, settings
from axonn_ext.grid import Grid
from axonn_ext.nn.sharded import rows_over
from axonn_ext.ops._arguments import check_tensor
from axonn_ext.spec.parallel import LAYOUTS, check_choice

IGNORE_INDEX = -100


class CrossEntropy(nn.Module):
    """The mean loss of all labelled rows of the global batch, which is equal on every rank.

        logits  [m / Gy, V / Gx]   labels  [m / Gy], where -100 means none   (replicated: m rows)

    The loss is divided by the number of labelled rows of the whole grid before backward. Gradients
    are therefore those of the global mean: over ranks they must be summed, never averaged.
    Labels must be -100 or lie in [0, V). Other labels raise ValueError on the CPU and with
    AXONN_DEBUG_TOKEN_IDS; otherwise, on a GPU, they are not detected.
    The loss is computed in fp32 (fp64 for fp64). Collectives: all-reduces of three numbers per row
    over x, then of two numbers in all over every axis that splits the rows.
    """

    def __init__(self, *, grid: Grid, layout: str = "sharded", algorithm: str = "auto") -> None:
        super().__init__()
        check_choice("layout", layout, LAYOUTS)
        self._axis = grid.axis("x")
        self._row_axes = [grid.axis(axis) for axis in reversed(rows_over(layout, "y"))]
        self._algorithm = algorithm
        self._checks_labels, self._rank = settings.load().debug_token_ids, grid.rank

    def forward(
        self, logits: Tensor, labels: Tensor, num_labels: Tensor | float | None = None
    ) -> Tensor:
        """Returns the loss, equal on every rank.

        num_labels: the number of rows to divide by; default the labelled rows of this call on all
        ranks. With gradient accumulation it is the number over all micro-batches and ranks.
        """
        total = self._total(logits, labels)
        if num_labels is None:
            count = (labels != IGNORE_INDEX).sum().to(total.dtype)
            num_labels = self._sum(count)
        return self._sum(total / num_labels)

    def share(self, logits: Tensor, labels: Tensor, num_labels: Tensor | float) -> Tensor:
        """Returns this rank's rows' part of the loss, of which the sum over ranks is the loss.

        Its gradients are those of the loss. It saves the all-reduces over the axes that split the
        rows, for a caller that adds up several parts first.
        """
        return self._total(logits, labels) / num_labels

    def _total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the sum of the losses of this rank's rows."""
        collectives.refuse_transforms("CrossEntropy")
        axis = self._axis
        losses: Tensor = _VocabParallelLoss.apply(
            logits, labels, *self._local(logits, labels), axis.name, axis.size, self._algorithm
        )
        return losses.sum()

    def _local(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each label's column in this rank's logits, and whether the column is there."""
        check_tensor("CrossEntropy", "logits", logits)
        check_tensor("CrossEntropy", "labels", labels, logits.device)
        if logits.dim() != 2 or labels.shape != logits.shape[:1]:
            raise ValueError(
                "CrossEntropy: logits and labels must have shapes [rows, columns] and [rows], got "
                f"{list(logits.shape)} and {list(labels.shape)}"
            )
        columns = logits.shape[1]
        local, is_here = torch.ops.axonn.local_rows(
            labels,
            self._axis.rank * columns,
            columns,
            self._axis.size * columns,
            IGNORE_INDEX,
            self._checks_labels,
            "CrossEntropy: labels",
            self._rank,
        )
        return local, is_here

    def _sum(self, value: Tensor) -> Tensor:
        for axis in self._row_axes:
            value = collectives.reduce_from(value, axis, algorithm=self._algorithm)
        return value


class _VocabParallelLoss(torch.autograd.Function):
    """losses [rows] = log(sum(exp(logits))) - logits[label]; zero for rows without a label."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        local: Tensor,
        inside: Tensor,
        name: str,
        size: int,
        algorithm: str,
    ) -> Tensor:
        axis = (name, size, algorithm)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        top = _all_reduce(wide.amax(1), "max", *axis)
        exponentials = (wide - top[:, None]).exp()
        label_logit = wide.gather(1, local[:, None]).squeeze(1) * inside
        sums = _all_reduce(torch.stack([exponentials.sum(1), label_logit]), "sum", *axis)
        has_label = labels != IGNORE_INDEX
        ctx.save_for_backward(exponentials / sums[0, :, None], local, inside, has_label)
        ctx.dtype = logits.dtype
        return (sums[0].log() + top - sums[1]) * has_label

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        probabilities, local, inside, has_label = ctx.saved_tensors
        dy = dy * has_label
        grad = probabilities * dy[:, None]
        grad = grad.scatter_add(1, local[:, None], -(dy * inside)[:, None])
        return grad.to(ctx.dtype), None, None, None, None, None, None


def _all_reduce(value: Tensor, reduce_op: str, name: str, size: int, algorithm: str) -> Tensor:
    if size == 1:
        return value
    return torch.ops.axonn.all_reduce(value, reduce_op, name, size, algorithm)
