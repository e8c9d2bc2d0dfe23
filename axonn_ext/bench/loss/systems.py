"""A loss and its gradient, by each of the ways that are compared.

Legend: M rows, V columns, on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from axonn_ext.grid import Grid
from axonn_ext.nn import CrossEntropy, goldfish_labels
from axonn_ext.nn.loss import IGNORE_INDEX
from axonn_ext.spec.goldfish import Goldfish

OURS, OURS_IN_PLACE, TORCH = "axonn_ext", "axonn_ext-in-place", "torch-fp32"
GOLDFISH = "axonn_ext-goldfish"
SYSTEMS = (TORCH, OURS, OURS_IN_PLACE, GOLDFISH)
BLOCK_ELEMENTS = 1 << 24  # of a reference: 128 MiB of float64


@dataclass(frozen=True)
class Batch:
    """Logits [M, V] and labels [M], in [0, V) or -100."""

    logits: Tensor
    labels: Tensor

    @classmethod
    def draw(cls, rows: int, vocab: int, dtype: torch.dtype, device: str) -> Batch:
        """Returns logits from a normal distribution with standard deviation 3."""
        generator = torch.Generator(device).manual_seed(0)
        logits = torch.empty(rows, vocab, dtype=dtype, device=device)
        logits.normal_(0, 3, generator=generator)
        labels = torch.randint(vocab, (rows,), generator=generator, device=device)
        return cls(logits, labels)

    def goldfish(self) -> Batch:
        """Returns the same logits, with the labels that Goldfish loss leaves of one sequence."""
        tokens = torch.cat([self.labels[:1], self.labels])  # the first one has no label
        return Batch(self.logits, goldfish_labels(tokens, Goldfish()))

    def for_system(self, system: str) -> Batch:
        """Returns the batch with the labels that a way to compute the loss learns."""
        return self.goldfish() if system == GOLDFISH else self


Outputs = tuple[Tensor, Tensor]  # the mean loss, and the gradient of the logits [M, V]


def bind(system: str, batch: Batch, grid: Grid) -> Callable[[], Outputs]:
    """Returns a call that computes the mean loss and its gradient.

    The calls of OURS_IN_PLACE and GOLDFISH overwrite the batch's logits; the time of a call does
    not depend on their values. That of GOLDFISH also finds out which labels are dropped.
    """
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        # fp32 (fp64 for fp64), as a loss has to be computed
        TORCH: lambda x, labels: functional.cross_entropy(
            x if x.dtype == torch.float64 else x.float(), labels
        ),
        OURS: CrossEntropy(grid=grid),
        OURS_IN_PLACE: CrossEntropy(grid=grid, in_place=True),
        GOLDFISH: CrossEntropy(grid=grid, in_place=True),
    }
    loss_of = losses[system]
    leaf = batch.logits.detach().requires_grad_()

    def call() -> Outputs:
        logits = leaf.view_as(leaf)  # computed, as a model's are, and in the same memory
        loss = loss_of(logits, batch.for_system(system).labels)
        (gradient,) = torch.autograd.grad(loss, logits)
        return loss.detach(), gradient

    return call


def worst_error(outputs: Outputs, batch: Batch) -> float:
    """Returns the largest relative error, against float64, of the loss and of the gradient.

    That of the gradient is relative to the largest magnitude in it. NaN is an infinite error.
    """
    loss, gradient = outputs
    kept = batch.labels != IGNORE_INDEX
    rows = kept.sum()
    total = torch.zeros((), dtype=torch.float64, device=loss.device)
    off, largest = total.clone(), total.clone()
    for part in _blocks(batch):
        wide, counts = batch.logits[part].double(), kept[part, None]
        labels = batch.labels[part, None].where(counts, 0)
        log_probabilities = wide.log_softmax(1)
        total -= log_probabilities.gather(1, labels).where(counts, 0).sum() / rows
        want = log_probabilities.exp_()
        want.scatter_add_(1, labels, -torch.ones_like(labels, dtype=want.dtype)).div_(rows)
        want *= counts
        largest = torch.maximum(largest, want.abs().amax())
        off = torch.maximum(off, want.sub_(gradient[part]).abs_().amax())
    error = torch.maximum((loss.double() - total).abs() / total.abs(), off / largest)
    return float(error.nan_to_num(nan=torch.inf))


def _blocks(batch: Batch) -> Iterator[slice]:
    rows, vocab = batch.logits.shape
    step = max(1, BLOCK_ELEMENTS // vocab)
    for begin in range(0, rows, step):
        yield slice(begin, begin + step)
