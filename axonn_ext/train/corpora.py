"""What a run reads: its sources and their vocabulary, and checks of both."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from axonn_ext.data import (
    ArrayTokens,
    ByteVocabulary,
    Corpus,
    CorpusOptions,
    Examples,
    RowGroup,
    Source,
    StoredVocabulary,
    Vocabulary,
    find_sources,
    load_corpus,
    load_examples,
    open_tokens,
    padded_size,
    split,
    stored_examples,
    text_bytes,
    vocabulary_of,
    whole,
)
from axonn_ext.data.corpus import DOCUMENTS, WINDOWS
from axonn_ext.data.orders import check_length
from axonn_ext.data.tokens import document_note
from axonn_ext.spec.model import ModelConfig
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.batches import make_batches, packed_batches
from axonn_ext.train.config import EXAMPLES, Config, ModelTable

if TYPE_CHECKING:
    from axonn_ext.data import Prompts
    from axonn_ext.data.stream_batches import Stream


@dataclass(frozen=True)
class Text:
    """The sources of a run, and the vocabulary of their tokens."""

    sources: tuple[Source, ...]
    vocabulary: Vocabulary | StoredVocabulary

    @property
    def encoder(self) -> Vocabulary | None:
        """The vocabulary that encodes text; None if the sources are token files, without one."""
        return None if isinstance(self.vocabulary, StoredVocabulary) else self.vocabulary


def sources_of(config: Config) -> tuple[Source, ...]:
    """Returns the sources that a configuration names. Raises ValueError, which names the key."""
    data = config.data
    try:
        return find_sources(data.text, data.mixture)
    except ValueError as error:
        raise ValueError(f"{config.text_key}: {error}") from None


def text_problems(config: Config, text: Text) -> list[str]:
    """Returns problems with the sources that can be found without reading them.

    This includes sources that are too short, except text whose tokens are not bytes.
    """
    problems: list[str] = []
    if config.is_stream:
        return _stream_problems(config)
    unused = [key.name for key in fields(config.stream)
              if getattr(config.stream, key.name) != key.default]  # fmt: skip
    if unused:
        problems.append(f"stream.{unused[0]} is only for a stream: data.text = hf:NAME")
    if config.data.order == EXAMPLES:  # any length will do
        return problems
    for source in text.sources:
        try:
            sizes = _sizes(config, text.vocabulary, source)
        except ValueError as error:
            problems.append(f"{config.text_key}: {error}")
            continue
        unit = "bytes" if source.is_text else "tokens"
        problems += _length_problems(config, source, sizes, unit) if sizes else []
    return problems


def text_and_model(config: Config, sources: tuple[Source, ...]) -> tuple[Text, ModelConfig]:
    """Returns the sources with their vocabulary, and the model config for it.

    Raises ValueError, which names the key, for incompatible sizes or a vocabulary that does not
    exist.
    """
    pretrained = _read_pretrained(config) if config.model.pretrained else None
    size = config.model.vocab_size if pretrained is None else pretrained.vocab_size
    try:
        text = Text(sources, vocabulary_of(sources, config.vocabulary, vocab_size=size))
    except ValueError as error:
        raise ValueError(f"data.vocabulary: {error}") from None
    if pretrained is None:
        return text, config.model_config(_vocab_size(config, text))
    if text.vocabulary.num_tokens > size:
        raise ValueError(
            f"model.pretrained: expected a vocabulary of at least {text.vocabulary.num_tokens}, "
            f"the tokens of {config.vocabulary}, got {size}"
        )
    return text, pretrained


def _read_pretrained(config: Config) -> ModelConfig:
    """Returns the config of model.pretrained. Raises ValueError if other keys contradict it."""
    table, default = config.model, ModelTable()
    free = ("pretrained", "implementation", "sequence_length")
    for key in fields(table):
        value = getattr(table, key.name)
        if key.name not in free and value != getattr(default, key.name):
            raise ValueError(
                f"model.{key.name}: expected no value with model.pretrained, whose config.json "
                f"decides it, got {value}"
            )
    from axonn_ext.models.pretrained import read_model

    found = read_model(Path(table.pretrained))
    if table.sequence_length > found.sequence_length:
        raise ValueError(
            f"model.sequence_length: expected at most {found.sequence_length}, as config.json of "
            f"{table.pretrained} says, got {table.sequence_length}"
        )
    return found


def _vocab_size(config: Config, text: Text) -> int:
    """Returns the size of the model's vocabulary.

    Raises ValueError if it is smaller than the number of tokens.
    """
    asked, needed = config.model.vocab_size, text.vocabulary.num_tokens
    if asked and asked < needed:
        name = f"data.vocabulary {config.vocabulary}"
        if isinstance(text.vocabulary, StoredVocabulary):
            name = text.vocabulary.name
        raise ValueError(
            f"model.vocab_size: expected at least {needed}, the tokens of {name}, got {asked}; 0 "
            "uses the required size"
        )
    return asked or padded_size(needed)


def load(
    config: Config, text: Text, vocab_size: int, *, reads_stream: bool = True
) -> Corpus | Examples | Stream:
    """Opens all sources, and reads those that are text.

    vocab_size: the model's. reads_stream: whether this rank reads a stream. Raises UserError if a
    source is too short or has larger token ids.
    """
    data = config.data
    if data.order == EXAMPLES:
        examples = examples_of(config, text, vocab_size)
        _check_epochs(config, examples)
        make_batches(config, examples, RowGroup())
        return examples
    if data.epochs:
        raise UserError(f"data.epochs: expected 0 with data.order {data.order}, got {data.epochs}")
    if config.is_stream:
        return _load_stream(config, text, reads=reads_stream)
    options = CorpusOptions(
        order=data.order, held_out=data.held_out, max_bytes=data.max_bytes,
        vocab_size=vocab_size,
    )  # fmt: skip
    try:
        corpus = load_corpus(text.sources, text.encoder, options)
        make_batches(config, corpus, RowGroup())
    except ValueError as error:
        raise UserError(f"{config.text_key}: {error}") from None
    return corpus


def _load_stream(config: Config, text: Text, *, reads: bool) -> Stream:
    """Opens a stream on the rank that reads it. Raises UserError if it cannot be read."""
    from axonn_ext.data.stream_batches import Stream

    if not reads:
        return Stream()
    from axonn_ext.data.stream import Documents

    assert text.encoder is not None, "a text needs a vocabulary"
    length, note = config.model.sequence_length, f"; raise stream.held_out {config.stream.held_out}"
    try:
        documents = Documents(config.data.text, config.stream, text.encoder, seed=config.train.seed)
        stream = Stream(documents, documents.held_out() if config.train.eval_interval else None)
        if stream.held_out is not None:
            check_length(whole(ArrayTokens(stream.held_out)), length, "held-out", note=note)
    except ValueError as error:
        raise UserError(f"data.text: {error}") from None
    return stream


def _stream_problems(config: Config) -> list[str]:
    """Returns the keys that do not go with a stream."""
    values = {
        "data.order": (config.data.order, WINDOWS),
        "data.max_bytes": (config.data.max_bytes, 0),
        "goldfish.k": (config.goldfish.k, 0),
    }
    problems = [
        f"{key}: expected {expected} with a stream (data.text), got {value}"
        for key, (value, expected) in values.items()
        if value != expected
    ]
    if config.train.eval_interval and not config.stream.held_out:
        problems.append("stream.held_out: expected documents for train.eval_interval, got 0")
    return problems


def examples_of(config: Config, text: Text, vocab_size: int) -> Examples:
    """Reads the examples of a configuration: lines of text, or the documents of token files.

    Raises UserError for anything that is not an example.
    """
    data, source = config.data, text.sources[0]
    if data.mixture or not data.text:
        raise UserError(f"{config.text_key}: data.order examples needs a text in data.text")
    if data.max_bytes:
        raise UserError("data.max_bytes: expected 0 with data.order examples, which reads all")
    length, skips = config.model.sequence_length, data.on_unusable == "skip"
    try:
        if source.is_text:
            assert text.encoder is not None, "a text needs a vocabulary"
            return load_examples(
                data.text, _prompts(config, text.encoder, vocab_size), sequence_length=length,
                held_out=data.held_out, skips=skips,
            )  # fmt: skip
        return stored_examples(
            open_tokens(source), sequence_length=length, vocab_size=vocab_size,
            held_out=data.held_out, skips=skips,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(f"data.text: {error}") from None


def _prompts(config: Config, vocabulary: Vocabulary, vocab_size: int) -> Prompts:
    """Returns the encoder of a run's examples. Raises UserError if it does not fit the model."""
    from axonn_ext.data import Prompts  # loads jinja2

    pretrained = config.model.pretrained
    try:
        prompts = Prompts(
            vocabulary, model=Path(pretrained) if pretrained else None, today=date_of(config)
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


def date_of(config: Config) -> date | None:
    """Returns data.date, which chat templates see. Raises UserError for what is no date."""
    text = config.data.date
    try:
        return date.fromisoformat(text) if text else None
    except ValueError:
        raise UserError(f"data.date: expected YYYY-MM-DD, got {text!r}") from None


def _check_epochs(config: Config, examples: Examples) -> None:
    """Raises UserError if some steps would come after data.epochs and have nothing to learn."""
    epochs, steps = config.data.epochs, config.train.steps
    if not epochs:
        return
    most = packed_batches(config, examples, RowGroup()).num_steps(epochs)
    if steps > most:
        raise UserError(
            f"train.steps: expected at most {most}, in which data.epochs {epochs} are read, "
            f"got {steps}"
        )


class _Sizes(NamedTuple):
    """The sizes of a source's parts; the note says why there is nothing to train on."""

    train: int
    held_out: int
    note: str = ""


def _sizes(
    config: Config, vocabulary: Vocabulary | StoredVocabulary, source: Source
) -> _Sizes | None:
    """Returns the sizes of the parts for training and evaluation; for text, in bytes.

    None if the text would have to be read. Raises ValueError for a source that cannot be read.
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
        f"{config.text_key}: the {part}{of} has {size} {unit}, but one sequence with its labels "
        f"needs {needed} (model.sequence_length + 1){note}"
        for part, size, note in parts
        if size < needed
    ]
