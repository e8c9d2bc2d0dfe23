"""Turns prompts, texts and chats into token ids, by the same rules in all commands.

docs/finetuning.md#special-tokens has the rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from axonn_ext.data.chat import Chat, ChatTemplates
from axonn_ext.data.tokenizer_files import TokenizerFiles, stop_ids
from axonn_ext.data.units import JSON_LINES, parse_line, shown
from axonn_ext.data.vocabulary import TokenizerVocabulary, Vocabulary
from axonn_ext.spec.files.files import read_text


class Prompts:
    """Encodes the text that a model reads and learns.

    model      the folder of the model, whose files may set stop_ids; else the tokenizer's eos does
    today      the date for chat templates; None: the current date
    end_id     the id that ends a learned text; None: no such id
    begin_id   the id before a text without context: bos, else eos as in transformers, else None
    stop_ids   the ids that end a generated text

    Raises: ValueError for an unreadable file in the model's or the tokenizer's folder.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, model: Path | None = None, today: date | None = None
    ) -> None:
        self.vocabulary = vocabulary
        self._front: list[int] = []
        files, eos, bos = TokenizerFiles(), None, None
        if isinstance(vocabulary, TokenizerVocabulary):
            self._front = vocabulary.front
            files = TokenizerFiles.of(vocabulary.path.parent)
            eos = vocabulary.find(files.special.get("eos_token", ""))
            bos = vocabulary.find(files.special.get("bos_token", ""))
        self._templates = ChatTemplates(files, today)
        stops = [] if model is None else stop_ids(model)
        if eos is not None and not stops:
            stops = [eos]
        self.stop_ids: Collection[int] = frozenset(stops)
        self.end_id = eos if eos in stops else next(iter(stops), None)
        self.begin_id = eos if bos is None else bos

    def prompt(self, text: str) -> list[int]:
        """Returns the ids of a text to be continued, without the tokenizer's suffix.

        The tokenizer's prefix is not repeated if the text itself begins with it.
        """
        return self.document(text.encode())

    def document(self, text: bytes) -> list[int]:
        """Same as `prompt` for bytes, which must be UTF-8 except with the vocabulary bytes."""
        ids = self.vocabulary.encode(text).tolist()
        return ids if ids[: len(self._front)] == self._front else self._front + ids

    def text(self, text: str) -> list[int]:
        """Returns the ids of a whole text, ending with end_id."""
        return self._ended(self.prompt(text))

    def completed(self, prompt: str, completion: str) -> tuple[list[int], int]:
        """Returns the ids of a prompt and its completion, and the number of ids in the prompt.

        Both are encoded together, unless this changes the prompt's last token.
        """
        given, ids = self.prompt(prompt), self.prompt(prompt + completion)
        if ids[: len(given)] != given:
            ids = given + self.vocabulary.encode(completion.encode()).tolist()
        return self._ended(ids), len(given)

    def chat(self, fields: Mapping[str, Any]) -> tuple[list[int], NDArray[np.bool_]]:
        """Returns the ids of a line with messages, and which of them are the assistant's.

        Raises: ValueError for an invalid line or template.
        """
        text, spans = self._templates.learned(Chat.of(fields))
        ids, places = self._tokenizer.encode_placed(text)
        # Spaces at the edges of a token do not count for its place; if all are spaces, it has none.
        begins, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
        begins = np.minimum(begins, ends - 1)
        learned = np.zeros(len(ids), dtype=np.bool_)
        for begin, end in spans:
            learned |= (begins < end) & (ends > begin)
        return ids, learned

    def chat_prompt(self, fields: Mapping[str, Any]) -> tuple[str, list[int]]:
        """Returns the text and the ids that prompt the assistant's next turn.

        A final turn of the assistant is left out, since it is to be generated.

        Raises: ValueError for an invalid line or template.
        """
        text = self._templates.text(Chat.of(fields).prompt, opens=True)
        return text, self._tokenizer.encode_placed(text)[0]

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, opens: bool) -> str:
        """Returns the text of messages, with the opening of the assistant's turn if it `opens`.

        Otherwise the text ends with the last message's own words, so that they can be continued.

        Raises: ValueError for invalid messages or an invalid template.
        """
        text = self._templates.text(Chat.of({"messages": list(messages)}), opens=opens)
        if opens:
            return text
        last = str(messages[-1].get("content", "")).strip()
        found = text.rfind(last)
        if found < 0:
            raise ValueError("the chat template changes the last message, so it cannot go on")
        return text[: found + len(last)]

    @property
    def _tokenizer(self) -> TokenizerVocabulary:
        assert isinstance(self.vocabulary, TokenizerVocabulary), "others have no chat template"
        return self.vocabulary

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if self.end_id is None or ids[-1:] == [self.end_id] else [*ids, self.end_id]


def read_prompts(file: Path, encoder: Prompts) -> Iterator[tuple[str, str, list[int]]]:
    """Yields the place, text and ids of the prompt of each line that is not blank.

    In .jsonl files, a prompt is the field prompt of a line, or the chat in its field messages.

    Raises: ValueError for a file that cannot be read, or, with the number of the line, for a line
        without a prompt.
    """
    for index, line in enumerate(read_text(file).split("\n"), start=1):
        if line.strip():
            where = f"{file}, line {index}"
            yield where, *_prompt_of(where, line, encoder, is_json=file.suffix == JSON_LINES)


def _prompt_of(
    where: str, line: str, encoder: Prompts, *, is_json: bool
) -> tuple[str, list[int]]:  # fmt: skip
    """Returns the text and the ids of a line. Raises ValueError if it has no prompt."""
    if not is_json:
        text = line.removesuffix("\r")
        return text, encoder.prompt(text)
    try:
        fields = parse_line(line.encode())
        if fields.get("messages") is not None:
            return encoder.chat_prompt(fields)
        prompt = fields.get("prompt")
        if not isinstance(prompt, str):
            raise ValueError('expected a text in the field prompt, or a chat in "messages"')
        return prompt, encoder.prompt(prompt)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; it begins {shown(line.encode())}") from None


def continuation(vocabulary: Vocabulary, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Returns the text of new tokens, which may depend on the prompt's, such as a space."""
    known = vocabulary.decode(list(prompt))
    # The id that ends a text may lie above those of the vocabulary.
    kept = [token for token in tokens if token < vocabulary.num_tokens]
    return vocabulary.decode([*prompt, *kept])[len(known) :]
