"""The part of `axonn-ext evaluate` that computes the loss of a text."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from axonn_ext.data import ByteVocabulary, Prompts
from axonn_ext.data.source import check_format, check_utf8
from axonn_ext.data.units import JSON_LINES
from axonn_ext.models.generation import score, windows
from axonn_ext.models.transformer import Transformer
from axonn_ext.terminal.console import Bar, Console, say
from axonn_ext.terminal.errors import UserError


@dataclass(frozen=True)
class TextScore:
    """The score of a text.

    tokens: those with a token before them. loss: their mean, in nats. bits_per_byte: the bits of
    all of them, over the bytes of the text.
    """

    file: str
    bytes: int
    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True)
class EvaluatedText:
    """A text in windows of the model's length, and how many of the last tokens of each count."""

    file: str
    num_bytes: int
    parts: list[tuple[list[int], int]]

    @classmethod
    def read(cls, file: Path, prompts: Prompts, length: int) -> EvaluatedText:
        """Raises UserError for a text that cannot be read, encoded or scored."""
        try:
            check_format(file)
            if file.suffix == JSON_LINES:
                raise ValueError(f"expected plain text, got JSON lines, {file}")
            content = file.read_bytes()
            if not isinstance(prompts.vocabulary, ByteVocabulary):
                check_utf8(content, file)
        except OSError as error:
            raise UserError(f"--text: cannot read {file}: {error.strerror}") from None
        except ValueError as error:  # also of a name with a zero byte
            raise UserError(f"--text: {error}") from None
        ids, begin = prompts.document(content) if content else [], prompts.begin_id
        parts = list(windows(ids, length, None if ids[:1] == [begin] else begin))
        if not parts:
            raise UserError(f"--text: expected at least two tokens in {file}, got {len(ids)}")
        return cls(str(file), len(content), parts)

    def score(self, model: Transformer) -> TextScore:
        """Returns the text's score, equal on every rank. Collectives: those of `score`."""
        sequences, counts = zip(*self.parts, strict=True)
        with closing(_Progress(len(sequences), shown=model.grid.rank == 0)) as progress:
            found = score(model, sequences, counts, advance=progress.advance)
        total, tokens = -sum(each.log_probability for each in found), sum(counts)
        loss = total / tokens
        bits = total / math.log(2) / self.num_bytes
        perplexity = math.exp(min(loss, 700.0))  # more is no float
        return TextScore(self.file, self.num_bytes, tokens, loss, perplexity, bits)


class _Progress:
    """Shows how many windows are scored: a bar on a terminal, else a line per tenth."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._total, self._done, self._shown = total, 0, shown
        self._console = Console(stderr=True)
        self._bar = Bar(self._console, total, shown=shown)
        self._bar.show("windows of the text")

    def advance(self, count: int) -> None:
        before, self._done = self._done, self._done + count
        self._bar.advance(count)
        is_tenth = 10 * before // self._total < 10 * self._done // self._total < 10
        if self._shown and not self._console.is_terminal and is_tenth:
            say(self._console, f"scored {self._done:,} of {self._total:,} windows of the text")

    def close(self) -> None:
        self._bar.close()
