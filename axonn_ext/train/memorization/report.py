"""Shows the results on a terminal: a row for each bucket, and a sentence as a summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from axonn_ext.terminal.console import new_table
from axonn_ext.train.memorization.results import GOLDFISH, PLAIN, ArmResult, BucketResult

_NAMES = ("model", "arm")  # columns of text
_COLUMNS = (
    "seen", "documents", "exact match", "95 % interval", "edit distance", "longest run", "loss"
)  # fmt: skip


def bucket_table(buckets: Sequence[BucketResult]) -> Table:
    """Returns the table of one model."""
    table = new_table(_COLUMNS, _NAMES, gap=4)
    for bucket in buckets:
        table.add_row(*_cells(bucket))
    return table


def arms_table(arms: Sequence[ArmResult]) -> Table:
    """Returns the table of an experiment, with a row for each model, arm and bucket."""
    table = new_table((*_NAMES, *_COLUMNS, "validation loss"), _NAMES, gap=4)
    for arm in arms:
        for number, bucket in enumerate(arm.buckets):
            name = (arm.model, arm.arm) if number == 0 else ("", "")
            loss = f"{arm.validation_loss:.4f}" if number == 0 else ""
            table.add_row(*name, *_cells(bucket), loss)
    return table


def summary(arms: Sequence[ArmResult]) -> Iterator[str]:
    """Yields a sentence for each model that was trained in both arms."""
    for plain in (arm for arm in arms if arm.arm == PLAIN):
        pairs = [arm for arm in arms if arm.arm == GOLDFISH and arm.model == plain.model]
        if pairs:
            yield _sentence(plain, pairs[0])


def describe(count: int) -> str:
    """Returns a human-readable number of parameters."""
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"


def _sentence(plain: ArmResult, goldfish: ArmResult) -> str:
    most = plain.buckets[-1]
    other = goldfish.buckets[-1]
    change = goldfish.validation_loss / plain.validation_loss - 1
    return (
        f"{plain.model} ({describe(plain.parameters)} parameters): of documents seen "
        f"{most.repetitions} times it repeats {most.share:.0%}, with Goldfish loss "
        f"{other.share:.0%}; of those never seen {plain.buckets[0].share:.0%} and "
        f"{goldfish.buckets[0].share:.0%}; with Goldfish loss the validation loss is "
        f"{abs(change):.1%} {'higher' if change >= 0 else 'lower'}"
    )


def _cells(bucket: BucketResult) -> tuple[str, ...]:
    low, high = bucket.interval
    seen = "unknown" if bucket.repetitions is None else str(bucket.repetitions)
    return (
        seen, str(bucket.documents), f"{bucket.share:.0%}", f"{low:.0%} to {high:.0%}",
        f"{bucket.edit_distance:.1f}", f"{bucket.longest_run:.1f}", f"{bucket.loss:.3f}",
    )  # fmt: skip
