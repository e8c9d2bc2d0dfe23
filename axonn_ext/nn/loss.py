"""Cross-entropy over a vocabulary that is split over x. The logits never leave their rank.

Legend: m rows of this rank's (data, z) group; V columns of the vocabulary; Gx, Gy ranks along axes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from axonn_ext.nn.sharded import rows_over
from axonn_ext.ops._arguments import check_tensor
from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec import settings
from axonn_ext.spec.parallel import LAYOUTS, check_choice

IGNORE_INDEX = -100


class CrossEntropy(nn.Module):
    """The mean loss of all labelled rows of the global batch, which is equal on every rank.

        logits  [m / Gy, V / Gx]   labels  [m / Gy], where -100 means none   (replicated: m rows)

    The loss is divided by the number of labelled rows of the whole grid before backward. Gradients
    are therefore those of the global mean: over ranks they must be summed, never averaged.
    Labels must be -100 or lie in [0, V). Other labels raise ValueError on the CPU and with
    AXONN_DEBUG_TOKEN_IDS; otherwise, on a GPU, they are not detected.

    The loss is computed in fp32 (fp64 for fp64), from logits of float32, float64, bfloat16 or
    float16. Forward reads each labelled row once and backward once more; no copy of the logits is
    made. Until backward, the logits and two numbers per row are kept. The gradient has the logits'
    dtype. A second derivative raises NotImplementedError.

    in_place: backward writes the gradient into the logits' own memory, which saves the size of the
    logits. It is for logits that nothing else uses once backward has begun:

    * Code that reads the logits after backward sees the gradient.
    * A second backward pass through the loss (retain_graph=True), another loss of the same logits,
      and another op that has saved them for its backward raise RuntimeError, because the logits
      have been modified, unless their backward came first. None computes a wrong gradient.
    * Logits that are a leaf raise ValueError. The gradient is written elsewhere if the elements of
      a row are not contiguous, under torch.compile, and with create_graph=True.

    Collectives: all-reduces of three numbers per row over x, then of two numbers in total over
    every axis that splits the rows.
    """

    def __init__(
        self,
        *,
        grid: Grid,
        layout: str = "sharded",
        algorithm: str = "auto",
        in_place: bool = False,
    ) -> None:
        super().__init__()
        check_choice("layout", layout, LAYOUTS)
        self._axis = grid.axis("x")
        self._row_axes = [grid.axis(axis) for axis in reversed(rows_over(layout, "y"))]
        self._algorithm, self._in_place = algorithm, in_place
        self._checks_labels, self._rank = settings.load().debug_token_ids, grid.rank

    def forward(
        self, logits: Tensor, labels: Tensor, num_labels: Tensor | float | None = None
    ) -> Tensor:
        """Returns the loss, equal on every rank.

        num_labels: the number of rows to divide by; default the labelled rows of this call on all
        ranks. With gradient accumulation, pass the number over all micro-batches and ranks.
        """
        total = self._total(logits, labels)
        if num_labels is None:
            count = (labels != IGNORE_INDEX).sum().to(total.dtype)
            num_labels = self._sum(count)
        return self._sum(total / num_labels)

    def share(self, logits: Tensor, labels: Tensor, num_labels: Tensor | float) -> Tensor:
        """Returns the part of the loss from this rank's rows; the sum over ranks is the loss.

        Its gradients are those of the loss. It saves the all-reduces over the axes that split the
        rows, for callers that add up several parts first.
        """
        return self._total(logits, labels) / num_labels

    def _total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the sum of the losses of this rank's rows."""
        collectives.refuse_transforms("CrossEntropy")
        self._check(logits, labels)
        axis = self._axis
        losses: Tensor = torch.ops.axonn.cross_entropy_forward(
            logits, labels, axis.rank * logits.shape[1], IGNORE_INDEX,
            self._in_place and not torch.compiler.is_compiling(),
            axis.name, axis.size,
            collectives.algorithm_of_collective(self._algorithm, logits),
        )[0]  # fmt: skip
        return losses.sum()

    def _check(self, logits: Tensor, labels: Tensor) -> None:
        check_tensor("CrossEntropy", "logits", logits)
        check_tensor("CrossEntropy", "labels", labels, logits.device)
        if logits.dim() != 2 or labels.shape != logits.shape[:1]:
            raise ValueError(
                "CrossEntropy: logits and labels must have shapes [rows, columns] and [rows], got "
                f"{list(logits.shape)} and {list(labels.shape)}"
            )
        if not (labels.is_cpu or self._checks_labels):
            return
        columns, size = logits.shape[1], self._axis.size
        torch.ops.axonn.local_rows(
            labels, self._axis.rank * columns, columns, size * columns, IGNORE_INDEX,
            self._checks_labels, "CrossEntropy: labels", self._rank,
        )  # fmt: skip

    def _sum(self, value: Tensor) -> Tensor:
        for axis in self._row_axes:
            value = collectives.reduce_from(value, axis, algorithm=self._algorithm)
        return value
