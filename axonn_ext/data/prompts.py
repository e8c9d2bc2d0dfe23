"""Turns prompts, texts and chats into token ids, by the same rules in all commands.

docs/finetuning.md#special-tokens has the rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from axonn_ext.data.chat import Chat, ChatTemplates
from axonn_ext.data.tokenizer_files import TokenizerFiles, stop_ids
from axonn_ext.data.vocabulary import TokenizerVocabulary, Vocabulary


class Prompts:
    """Encodes the text that a model reads and learns.

    model      the folder of the model, whose files may set stop_ids; else the tokenizer's eos does
    today      the date for chat templates; None: the current date
    end_id     the id that ends a learned text; None: no such id
    stop_ids   the ids that end a generated text

    Raises: ValueError for an unreadable file in the model's or the tokenizer's folder.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, model: Path | None = None, today: date | None = None
    ) -> None:
        self.vocabulary = vocabulary
        self._front: list[int] = []
        files, eos = TokenizerFiles(), None
        if isinstance(vocabulary, TokenizerVocabulary):
            self._front = vocabulary.front
            files = TokenizerFiles.of(vocabulary.path.parent)
            eos = vocabulary.find(files.special.get("eos_token", ""))
        self._templates = ChatTemplates(files, today)
        stops = [] if model is None else stop_ids(model)
        if eos is not None and not stops:
            stops = [eos]
        self.stop_ids: Collection[int] = frozenset(stops)
        self.end_id = eos if eos in stops else next(iter(stops), None)

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

    @property
    def _tokenizer(self) -> TokenizerVocabulary:
        assert isinstance(self.vocabulary, TokenizerVocabulary), "others have no chat template"
        return self.vocabulary

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if self.end_id is None or ids[-1:] == [self.end_id] else [*ids, self.end_id]
