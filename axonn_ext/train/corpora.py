"""What a run reads: its sources, what is wrong with them, and its batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from axonn_ext.data import (
    Batches,
    ByteVocabulary,
    Corpus,
    CorpusOptions,
    Evaluation,
    EvaluationBatches,
    Examples,
    PackedBatches,
    PackedEvaluation,
    RowGroup,
    Source,
    StoredVocabulary,
    TrainingBatches,
    Vocabulary,
    find_sources,
    load_corpus,
    load_examples,
    open_tokens,
    split,
    stored_examples,
    text_bytes,
)
from axonn_ext.data.corpus import DOCUMENTS
from axonn_ext.data.tokens import document_note
from axonn_ext.terminal.errors import TrainingError, UserError
from axonn_ext.train.config import EXAMPLES, Config

if TYPE_CHECKING:
    from axonn_ext.data import Prompts
    from axonn_ext.train.job import Job


def sources_of(config: Config) -> tuple[Source, ...]:
    """Returns the sources that a configuration names. Raises ValueError, with the key."""
    data = config.data
    try:
        return find_sources(data.text, data.mixture)
    except ValueError as error:
        raise ValueError(f"{_key(config)}: {error}") from None


def text_problems(
    config: Config, vocabulary: Vocabulary | StoredVocabulary, sources: tuple[Source, ...]
) -> list[str]:
    """Returns problems with the sources that show without reading them.

    This includes whether they are long enough, but for text whose tokens are not bytes.
    """
    problems: list[str] = []
    if config.data.order == EXAMPLES:  # any length will do
        return problems
    for source in sources:
        try:
            sizes = _sizes(config, vocabulary, source)
        except ValueError as error:
            problems.append(f"{_key(config)}: {error}")
            continue
        unit = "bytes" if source.is_text else "tokens"
        problems += _length_problems(config, source, sizes, unit) if sizes else []
    return problems


def load(job: Job) -> Corpus | Examples:
    """Opens the sources, and reads those that are text.

    Raises UserError if one is too short or does not fit the vocabulary.
    """
    config, data = job.config, job.config.data
    vocabulary = None if isinstance(job.vocabulary, StoredVocabulary) else job.vocabulary
    if data.order == EXAMPLES:
        examples = examples_of(config, vocabulary, job.model.vocab_size, source=job.sources[0])
        _check_epochs(config, examples)
        make_batches(job, examples, RowGroup())
        return examples
    if data.epochs:
        raise UserError(f"data.epochs: expected 0 with data.order {data.order}, got {data.epochs}")
    options = CorpusOptions(
        order=data.order, held_out=data.held_out, max_bytes=data.max_bytes,
        vocab_size=job.model.vocab_size,
    )  # fmt: skip
    try:
        corpus = load_corpus(job.sources, vocabulary, options)
        make_batches(job, corpus, RowGroup())
    except ValueError as error:
        raise UserError(f"{_key(config)}: {error}") from None
    return corpus


def make_batches(
    job: Job, corpus: Corpus | Examples, group: RowGroup
) -> tuple[Batches, Evaluation | None]:
    """Returns a row group's share of the batches for training and, if asked for, evaluation.

    Raises: ValueError if the text is too short.
    """
    train, length = job.config.train, job.config.model.sequence_length
    if isinstance(corpus, Examples):
        packed = packed_batches(job.config, corpus, group)
        if not train.eval_interval or not corpus.held_out:
            return packed, None
        return packed, PackedEvaluation(
            corpus.held_out, sequence_length=length, batch_size=job.config.micro_batch_size,
            num_batches=train.eval_batches, group=group,
        )  # fmt: skip
    order = corpus.training_order(
        sequence_length=length, batch_size=train.batch_size, seed=train.seed
    )
    training = TrainingBatches(
        order, batch_size=train.batch_size, num_micro_batches=train.micro_batches, group=group,
        goldfish=job.config.goldfish_options(),
    )  # fmt: skip
    if not train.eval_interval:
        return training, None
    evaluation = EvaluationBatches(
        corpus.held_out(), sequence_length=length, batch_size=job.config.micro_batch_size,
        num_batches=train.eval_batches, weights=corpus.weights, group=group,
    )  # fmt: skip
    return training, evaluation


def examples_of(
    config: Config, vocabulary: Vocabulary | None, vocab_size: int, *, source: Source
) -> Examples:
    """Reads the examples of a configuration: lines of text, or the documents of token files.

    vocabulary: may be None if the source is no text. Raises UserError for what is no example.
    """
    data = config.data
    if data.mixture or not data.text:
        raise UserError(f"{_key(config)}: data.order examples needs a text in data.text")
    if data.max_bytes:
        raise UserError("data.max_bytes: expected 0 with data.order examples, which reads all")
    length, skips = config.model.sequence_length, data.on_unusable == "skip"
    try:
        if source.is_text:
            assert vocabulary is not None, "a text needs a vocabulary"
            return load_examples(
                data.text, _prompts(config, vocabulary, vocab_size), sequence_length=length,
                held_out=data.held_out, skips=skips,
            )  # fmt: skip
        return stored_examples(
            open_tokens(source), sequence_length=length, vocab_size=vocab_size,
            held_out=data.held_out, skips=skips,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(f"data.text: {error}") from None


def _prompts(config: Config, vocabulary: Vocabulary, vocab_size: int) -> Prompts:
    """Returns what encodes a run's examples. Raises UserError if it cannot, for this model."""
    from axonn_ext.data import Prompts  # loads jinja2

    pretrained = config.model.pretrained
    try:
        prompts = Prompts(
            vocabulary, model=Path(pretrained) if pretrained else None, today=_date(config)
        )
    except ValueError as error:
        raise UserError(
            f"{'model.pretrained' if pretrained else 'data.vocabulary'}: {error}"
        ) from None
    if prompts.end_id is not None and prompts.end_id >= vocab_size:
        raise UserError(
            f"model.pretrained: expected an eos_token_id below {vocab_size}, the size of the "
            f"vocabulary, in generation_config.json or config.json of {pretrained}, got "
            f"{prompts.end_id}"
        )
    return prompts


def _date(config: Config) -> date | None:
    text = config.data.date
    try:
        return date.fromisoformat(text) if text else None
    except ValueError:
        raise UserError(f"data.date: expected YYYY-MM-DD, got {text!r}") from None


def _check_epochs(config: Config, examples: Examples) -> None:
    """Raises UserError if a step would come after data.epochs, and so have nothing to learn."""
    epochs, steps = config.data.epochs, config.train.steps
    if not epochs:
        return
    most = packed_batches(config, examples, RowGroup()).num_steps(epochs)
    if steps > most:
        raise UserError(
            f"train.steps: expected at most {most}, in which data.epochs {epochs} are read, "
            f"got {steps}"
        )


def packed_batches(config: Config, examples: Examples, group: RowGroup) -> PackedBatches:
    """Returns a row group's share of the packed examples."""
    train = config.train
    return PackedBatches(
        examples.train, sequence_length=config.model.sequence_length, batch_size=train.batch_size,
        num_micro_batches=train.micro_batches, seed=train.seed, epochs=config.data.epochs,
        group=group, goldfish=config.goldfish_options(),
    )  # fmt: skip


@contextmanager
def reading(config: Config) -> Iterator[None]:
    """Must enclose the reading of batches; turns errors of files into TrainingError."""
    try:
        yield
    except ValueError as error:
        raise TrainingError(f"{_key(config)}: {error}") from None


class _Sizes(NamedTuple):
    """Of the parts of a source; the note says why there is nothing to train on."""

    train: int
    held_out: int
    note: str = ""


def _key(config: Config) -> str:
    return "data.mixture" if config.data.mixture else "data.text"


def _sizes(
    config: Config, vocabulary: Vocabulary | StoredVocabulary, source: Source
) -> _Sizes | None:
    """Returns the sizes of the parts for training and evaluation, of text in bytes.

    None: that would need the text. Raises ValueError for a source that cannot be read.
    """
    data = config.data
    if not source.is_text:
        tokens = open_tokens(source)
        parts = split(tokens, data.held_out, by_documents=data.order == DOCUMENTS)
        note = document_note(parts[0]) if data.order == DOCUMENTS else ""
        return _Sizes(parts[0].count, parts[1].count, note)
    num_bytes = text_bytes(source.name, max_bytes=data.max_bytes)
    if not isinstance(vocabulary, ByteVocabulary) or data.order == DOCUMENTS:
        return None
    held_out = int(num_bytes * data.held_out)
    return _Sizes(num_bytes - held_out, held_out)


def _length_problems(config: Config, source: Source, sizes: _Sizes, unit: str) -> list[str]:
    needed = config.model.sequence_length + 1
    parts = [("training text", sizes.train, sizes.note)]
    if config.train.eval_interval:
        parts.append(("held-out text (data.held_out)", sizes.held_out, ""))
    of = f" of {source.name}" if config.data.mixture else ""
    return [
        f"{_key(config)}: the {part}{of} has {size} {unit}, but one sequence with its labels needs "
        f"{needed} (model.sequence_length + 1){note}"
        for part, size, note in parts
        if size < needed
    ]
