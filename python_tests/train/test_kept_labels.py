"""Goldfish loss is divided by the number of kept labels, of all micro-batches on all ranks."""

from __future__ import annotations

import math

import pytest
import torch

from axonn_ext import GridShape
from axonn_ext.data import Batch
from axonn_ext.train.batches import count_labels, row_group
from grids import grid_of
from trained_here import train_here


def batches_of(group: int) -> list[Batch]:
    """Micro-batches of a row group; each row group drops different labels."""
    ids = torch.randint(64, (3, 2, 32), generator=torch.Generator().manual_seed(group))
    return [Batch(part, part.where(part > 20 + 10 * group, -100)) for part in ids]


def counted(shape: GridShape) -> float:
    grid = grid_of(shape)
    return count_labels(batches_of(row_group(grid).index), grid, device="cpu")


@pytest.mark.parametrize("shape", [GridShape(z=2, data=2), GridShape(x=2, data=2)], ids=str)
def test_labels_are_counted_on_all_ranks(pool, shape: GridShape) -> None:
    """Each label counts once, although the ranks of x and y have the same ones."""
    groups = range(shape.z * shape.data)
    want = sum(int((b.labels >= 0).sum()) for group in groups for b in batches_of(group))
    assert pool(4).run(counted, shape) == [want] * 4


def test_the_loss_is_a_mean_over_kept_labels(tmp_path) -> None:
    """At first, all bytes are equally likely; divided by all labels, the loss would be half."""
    options = {"goldfish.k": 2, "goldfish.h": 2, "train.steps": 1, "train.eval_interval": 0}
    (step,) = train_here(tmp_path / "run", **options, train__micro_batches=2).steps
    assert 0.3 < step.dropped < 0.65
    assert step.loss == pytest.approx(math.log(256), rel=0.02)
