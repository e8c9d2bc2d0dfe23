"""Chats: messages that a model's own chat template turns into text, as transformers does.

A template marks the assistant's words with {% generation %} and {% endgeneration %}. Without these
tags they are the text that a turn of the assistant adds to the messages before it, including the
opening of that turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from axonn_ext.data.tokenizer_files import DEFAULT, TokenizerFiles
from axonn_ext.data.units import whole_text

ASSISTANT = "assistant"
TOOL_USE = "tool_use"  # the name of a template for lines with tools
# These characters (Unicode noncharacters) may not occur in any text. They enclose the assistant's
# words in a rendering from which only positions are taken.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARK = re.compile(f"[{_BEGIN}{_END}]")
_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Span = tuple[int, int]  # characters [begin, end) of a text


@dataclass(frozen=True)
class Chat:
    """Messages, and the other inputs of a template: tools, documents and its own options."""

    messages: tuple[dict[str, Any], ...]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Chat:
        """Returns the chat of a line. Raises ValueError for one without messages."""
        messages, more = fields.get("messages"), fields.get("chat_template_kwargs") or {}
        roles = isinstance(messages, list) and all(
            isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages
        )
        if not messages or not isinstance(messages, list) or not roles:
            raise ValueError(
                'expected "messages" to be a list of at least one object, each with a "role"'
            )
        tools = fields.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        if not isinstance(more, dict) or not isinstance(tools, list | None):
            raise ValueError(
                'expected "tools" to be a list and "chat_template_kwargs" to be an object'
            )
        options = {"tools": tools or None, "documents": fields.get("documents")}
        return cls(tuple(messages), options | more)

    def first(self, count: int) -> Chat:
        """Returns the chat of the first messages."""
        return Chat(self.messages[:count], self.options)

    @property
    def prompt(self) -> Chat:
        """The chat without a final turn of the assistant, which the model is to generate."""
        count = len(self.messages)
        while count and self.messages[count - 1]["role"] == ASSISTANT:
            count -= 1
        return self.first(count)


class _Generation(Extension):
    """The tag {% generation %}; its body is enclosed in two marks, if given."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [nodes.Output([nodes.Name(name, "load")]) for name in ("axonn_begin", "axonn_end")]
        return [marks[0], nodes.Scope(body).set_lineno(line), marks[1]]


class ChatTemplates:
    """The chat templates of a tokenizer.

    today: the date that templates get from strftime_now

    Raises ValueError for an invalid Jinja template.
    """

    def __init__(self, files: TokenizerFiles, today: date | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        day = today or date.today()  # the same date in all renderings, as they are compared
        environment.globals |= {"raise_exception": _refuse, "strftime_now": day.strftime}
        self._special = dict(files.special)
        self._tagged = {name for name, text in files.templates.items() if _TAG.search(text)}
        try:
            self._templates = {
                name: environment.from_string(text) for name, text in files.templates.items()
            }
        except TemplateError as error:
            raise ValueError(f"the chat template is not Jinja: {error}") from None

    def text(self, chat: Chat, *, opens: bool = False, marks: str = "") -> str:
        """Returns the text of a chat, with the opening of the assistant's turn if it `opens`.

        Raises ValueError if there is no template, or it refuses the chat.
        """
        variables = self._special | dict(chat.options)
        variables |= {"messages": list(chat.messages), "add_generation_prompt": opens}
        if marks:
            variables |= {"axonn_begin": marks[0], "axonn_end": marks[1]}
        template = self._templates[self._name(chat)]
        try:
            return whole_text(template.render(variables))
        except Exception as error:  # a template can raise anything
            raise ValueError(f"the chat template refuses these messages: {error}") from None

    def learned(self, chat: Chat) -> tuple[str, list[Span]]:
        """Returns the text of a chat, and where the assistant speaks. Raises ValueError."""
        text = self.text(chat)
        if _MARK.search(text):
            raise ValueError("expected text without U+FDD0 and U+FDD1, which are not characters")
        tagged = self._name(chat) in self._tagged
        return text, self._marked(chat, text) if tagged else self._added(chat, text)

    def _marked(self, chat: Chat, text: str) -> list[Span]:
        """Returns the spans that the template puts into {% generation %}."""
        begins, marked = [], self.text(chat, marks=_BEGIN + _END)
        spans: list[Span] = []
        for number, match in enumerate(_MARK.finditer(marked)):
            place = match.start() - number
            if match[0] == _BEGIN:
                begins.append(place)
            elif begins:
                spans.append((begins.pop(), place))
        if begins or _MARK.sub("", marked) != text:
            raise ValueError("the chat template changes the text in {% generation %}")
        return spans

    def _added(self, chat: Chat, text: str) -> list[Span]:
        """Returns the spans that the assistant's turns add to the turns before them."""
        spans = []
        for number, message in enumerate(chat.messages):
            if message["role"] != ASSISTANT:
                continue
            before = self.text(chat.first(number), opens=True)
            after = self.text(chat.first(number + 1))
            if not (text.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"the chat template writes the first {number + 1} messages differently when "
                    "others follow or the last is missing, so that what the assistant says cannot "
                    "be told from the rest; put {% generation %} and {% endgeneration %} around it "
                    "in the template"
                )
            spans.append((len(before), len(after)))
        return spans

    def _name(self, chat: Chat) -> str:
        name = TOOL_USE if chat.options.get("tools") and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            raise ValueError(
                'messages need a chat template: expected chat_template.jinja, or "chat_template" '
                "in tokenizer_config.json, in the tokenizer's folder"
            )
        return name


def _to_json(value: object, **options: Any) -> str:
    """Writes plain JSON; Jinja's own filter escapes HTML characters."""
    return json.dumps(value, **({"ensure_ascii": False} | options))


def _refuse(message: object) -> NoReturn:
    raise TemplateError(str(message))
