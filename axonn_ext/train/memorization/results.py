"""The results of an experiment: a row for each bucket, a run for each model and arm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonn_ext.models.transformer import Transformer
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import read_json
from axonn_ext.spec.files.tables import Table
from axonn_ext.train.memorization.documents import Document
from axonn_ext.train.memorization.extraction import Extraction, continuation_loss, extract
from axonn_ext.train.memorization.measures import wilson

PLAIN, GOLDFISH = "plain", "goldfish"
ARMS = (PLAIN, GOLDFISH)


@dataclass(frozen=True)
class BucketResult:
    """How well a model reproduces the documents of a bucket.

    repetitions       how often each was seen; None if not given
    documents         number of documents
    matches           number whose end the model reproduces, token for token
    edit_distance     the mean over the documents, in tokens
    longest_run       likewise
    loss              the mean over the tokens of the ends, in nats
    """

    repetitions: int | None
    documents: int
    matches: int
    edit_distance: float
    longest_run: float
    loss: float

    @property
    def share(self) -> float:
        """The share of the documents whose end the model reproduces."""
        return self.matches / self.documents

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson interval of that share."""
        return wilson(self.matches, self.documents)

    @classmethod
    def of(cls, extractions: Sequence[Extraction], loss: float) -> BucketResult:
        """Returns the result for documents with the same number of repetitions."""
        [repetitions] = {each.document.repetitions for each in extractions}
        count = len(extractions)
        return cls(
            repetitions, count, sum(each.matches for each in extractions),
            sum(each.edit_distance for each in extractions) / count,
            sum(each.longest_run for each in extractions) / count, loss,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        low, high = self.interval
        rest = {"share": self.share, "low": low, "high": high}
        return dataclasses.asdict(self) | rest

    @classmethod
    def read(cls, table: Table) -> BucketResult:
        """Returns a result written by `as_json`. Raises InputError for anything else."""
        has = table.without_nulls().has("repetitions")
        result = cls(
            table.count("repetitions", least=0) if has else None,
            table.count("documents"), table.count("matches", least=0),
            table.at_least("edit_distance", 0), table.at_least("longest_run", 0),
            table.at_least("loss", 0),
        )  # fmt: skip
        if result.matches > result.documents:
            raise table.error("matches", f"at most {result.documents}, the documents")
        return result


@dataclass(frozen=True)
class ArmResult:
    """A model that was trained in one arm.

    model           its name in the experiment
    parameters      number of parameters
    arm             "plain" or "goldfish"
    validation      (step, plain loss) on text that is not trained on; the last entry is final
    """

    model: str
    parameters: int
    arm: str
    steps: int
    validation: tuple[tuple[int, float], ...]
    buckets: tuple[BucketResult, ...]

    @property
    def validation_loss(self) -> float:
        return self.validation[-1][1]

    def as_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self) | {"validation_loss": self.validation_loss}
        return values | {"buckets": [bucket.as_json() for bucket in self.buckets]}


def measure(
    model: Transformer, documents: Sequence[Document],
    advance: Callable[[int], None] = lambda count: None,
) -> list[BucketResult]:  # fmt: skip
    """Returns a row for each bucket of documents, by repetitions. All ranks call it.

    advance, collectives and errors: as in `extract` and `continuation_loss`.
    """
    extractions = extract(model, documents, advance=advance)
    found = []
    for repetitions in sorted(
        {d.repetitions for d in documents}, key=lambda r: -1 if r is None else r
    ):
        bucket = [each for each in extractions if each.document.repetitions == repetitions]
        loss = continuation_loss(model, [each.document for each in bucket])
        found.append(BucketResult.of(bucket, loss))
    return found


def read_buckets(path: Path) -> tuple[BucketResult, ...]:
    """Returns the rows of a file written by the command. Raises InputError."""
    table = Table(read_json(path), "", str(path))
    found = tuple(BucketResult.read(each) for each in table.tables("buckets"))
    if not found:
        raise InputError(f"{path}: expected at least one bucket, got none")
    return found
