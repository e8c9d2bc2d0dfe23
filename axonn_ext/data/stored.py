"""The vocabulary of a run: the named one, or the one of its token files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from axonn_ext.data.corpus import Source
from axonn_ext.data.vocabulary import BYTES, StoredVocabulary, Vocabulary, open_vocabulary
from axonn_ext.spec.files.token_files import Description, read_description


def vocabulary_of(
    sources: Sequence[Source], name: str, *, vocab_size: int = 0
) -> Vocabulary | StoredVocabulary:
    """Returns the vocabulary of all sources.

    name: the key data.vocabulary. Token files written by axonn-ext tokenize name their vocabulary,
    which must be the same, or replaces "bytes" if there is no text. vocab_size: the model's, used
    for tokens of unknown vocabulary; 0: unknown.

    Raises: ValueError for sources with different vocabularies, or without a known one.
    """
    stored = list(_descriptions(sources))
    if name == BYTES and not any(source.is_text for source in sources):
        if stored:
            _check_equal(stored)
            about = stored[0][1]
            return StoredVocabulary(about.vocabulary, about.vocabulary_size, about.sha256)
        if not vocab_size:
            raise ValueError(
                f"nothing says what the tokens of {sources[0].name} are: name their tokenizers "
                "file in data.vocabulary, or the number of tokens in model.vocab_size"
            )
        return StoredVocabulary("unknown", vocab_size)
    vocabulary = open_vocabulary(name)
    for source, about in stored:
        if about.sha256 != vocabulary.sha256:
            raise ValueError(
                f"the tokens of {source.name} are those of {about.vocabulary}, not of {name}"
            )
    return vocabulary


def _descriptions(sources: Sequence[Source]) -> Iterator[tuple[Source, Description]]:
    for source in sources:
        about = read_description(source.files) if source.files is not None else None
        if about is not None:
            yield source, about


def _check_equal(stored: Sequence[tuple[Source, Description]]) -> None:
    first, expected = stored[0]
    for source, about in stored[1:]:
        if about.sha256 != expected.sha256:
            raise ValueError(
                f"the tokens of {first.name} are those of {expected.vocabulary}, but those of "
                f"{source.name} are of {about.vocabulary}"
            )
