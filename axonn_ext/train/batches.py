"""The batches of a run: each row group's share, and the number of labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from axonn_ext.data import (
    ArrayTokens,
    Batch,
    Batches,
    Corpus,
    Evaluation,
    EvaluationBatches,
    Examples,
    Part,
    RowGroup,
    TrainingBatches,
    whole,
)
from axonn_ext.nn.loss import IGNORE_INDEX
from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import Grid
from axonn_ext.terminal.errors import TrainingError
from axonn_ext.train.config import Config

if TYPE_CHECKING:
    from axonn_ext.data import PackedBatches
    from axonn_ext.data.stream_batches import Stream


def row_group(grid: Grid) -> RowGroup:
    """Returns this rank's row group (its data and z coordinates), which decides what it reads."""
    num_z = grid.size("z")
    return RowGroup(grid.coords["data"] * num_z + grid.coords["z"], grid.size("data") * num_z)


def make_batches(
    config: Config, corpus: Corpus | Examples | Stream, group: RowGroup
) -> tuple[Batches, Evaluation | None]:
    """Returns a row group's share of the batches for training and, if enabled, evaluation.

    Collectives: for a stream, those of `stream_batches`.

    Raises: ValueError if the text is too short.
    """
    train, length = config.train, config.model.sequence_length
    if isinstance(corpus, Examples):
        from axonn_ext.data import PackedEvaluation

        packed = packed_batches(config, corpus, group)
        if not train.eval_interval or not corpus.held_out:
            return packed, None
        return packed, PackedEvaluation(
            corpus.held_out, sequence_length=length, batch_size=config.micro_batch_size,
            num_batches=train.eval_batches, group=group,
        )  # fmt: skip
    if not isinstance(corpus, Corpus):
        return stream_batches(config, corpus, group)
    order = corpus.training_order(
        sequence_length=length, batch_size=train.batch_size, seed=train.seed
    )
    training = TrainingBatches(
        order, batch_size=train.batch_size, num_micro_batches=train.micro_batches, group=group,
        goldfish=config.goldfish_options(),
    )  # fmt: skip
    if not train.eval_interval:
        return training, None
    return training, _evaluation(config, corpus.held_out(), group, corpus.weights)


def stream_batches(
    config: Config, stream: Stream, group: RowGroup
) -> tuple[Batches, Evaluation | None]:
    """Returns a row group's share of a stream's batches; all ranks call it together.

    Collectives, with evaluation: three broadcasts, the last one of the tokens held out.

    Raises: ValueError if too few tokens are held out.
    """
    from axonn_ext.data.stream_batches import StreamBatches

    train = config.train
    training = StreamBatches(
        stream.documents, sequence_length=config.model.sequence_length,
        batch_size=train.batch_size, num_micro_batches=train.micro_batches, group=group,
    )  # fmt: skip
    if not train.eval_interval:
        return training, None
    held_out = whole(ArrayTokens(stream.held_out_everywhere(), name=config.data.text))
    return training, _evaluation(config, [held_out], group)


def _evaluation(
    config: Config, parts: Sequence[Part], group: RowGroup, weights: Sequence[float] = (1.0,)
) -> EvaluationBatches:
    return EvaluationBatches(
        parts, sequence_length=config.model.sequence_length, batch_size=config.micro_batch_size,
        num_batches=config.train.eval_batches, weights=weights, group=group,
    )  # fmt: skip


def packed_batches(config: Config, examples: Examples, group: RowGroup) -> PackedBatches:
    """Returns a row group's share of the packed examples."""
    from axonn_ext.data import PackedBatches

    train = config.train
    return PackedBatches(
        examples.train, sequence_length=config.model.sequence_length, batch_size=train.batch_size,
        num_micro_batches=train.micro_batches, seed=train.seed, epochs=config.data.epochs,
        group=group, goldfish=config.goldfish_options(),
    )  # fmt: skip


@contextmanager
def reading(config: Config) -> Iterator[None]:
    """Wraps the reading of batches; turns file errors into TrainingError."""
    try:
        yield
    except ValueError as error:
        raise TrainingError(f"{config.text_key}: {error}") from None


def count_labels(batches: Sequence[Batch], grid: Grid, *, device: str) -> float:
    """Returns the number of labels in a step's micro-batches over all ranks, equal on all ranks.

    batches: this rank's row group's. device: where the collectives run. Collectives: an all-reduce
    of one int64 over z and one over data; the host waits for them.
    """
    count = torch.tensor(0, dtype=torch.int64)
    for batch in batches:
        count += (batch.labels != IGNORE_INDEX).sum()
    total = count.reshape(1).to(device)
    for axis in ("z", "data"):
        # One number: whatever the run's algorithm is, there is nothing to fuse or to measure.
        total = collectives.all_reduce(total, grid.axis(axis), algorithm="sequential")
    return float(total)
