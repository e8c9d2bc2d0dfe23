"""Reads special tokens, chat templates and stop ids from a model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import is_file, read_json, read_text

TOKENIZER = "tokenizer.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # a folder; each template is named after its file
DEFAULT = "default"  # the name of the template that a tokenizer uses by default
_CHAT_TEMPLATE = "chat_template"  # the key of TOKENIZER_CONFIG
_SPECIAL = "additional_special_tokens"


@dataclass(frozen=True)
class TokenizerFiles:
    """The files next to a tokenizer.

    special      text of the special tokens by name, such as eos_token
    templates    chat templates by name
    """

    special: Mapping[str, Any] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> TokenizerFiles:
        """Reads the files of a folder. Raises InputError if a file cannot be read."""
        config = _table(folder / TOKENIZER_CONFIG)
        special = _special(_table(folder / "special_tokens_map.json")) | _special(config)
        found = config.get(_CHAT_TEMPLATE)
        named = found if isinstance(found, list) else [{"name": DEFAULT, "template": found}]
        templates: dict[str, str] = {}
        for each in named:
            pair = (each.get("name"), each.get("template")) if isinstance(each, Mapping) else ()
            match pair:
                case (str(name), str(text)):
                    templates[name] = text
        for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
            templates[file.stem] = read_text(file)
        if is_file(folder / CHAT_TEMPLATE):
            templates[DEFAULT] = read_text(folder / CHAT_TEMPLATE)
        return cls(special, templates)


def stop_ids(folder: Path) -> list[int]:
    """Returns the ids that end a text (eos_token_id); empty if the files name none.

    Raises InputError if a file cannot be read.
    """
    for name in (GENERATION_CONFIG, "config.json"):
        value = _table(folder / name).get("eos_token_id")
        ids: list[Any] = value if isinstance(value, list) else [value]
        found = [each for each in ids if type(each) is int and each >= 0]
        if found:
            return found
    return []


def _special(table: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        key: _text(value) for key, value in table.items() if key.endswith("_token")
    }
    more = table.get(_SPECIAL)
    if isinstance(more, list) and more:
        found[_SPECIAL] = [_text(each) for each in more]
    return {key: value for key, value in found.items() if value is not None}


def _text(token: object) -> str | None:
    """Returns the text of a token, which may be an object that describes it."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def _table(path: Path) -> Mapping[str, Any]:
    found = read_json(path) if is_file(path) else {}
    if not isinstance(found, Mapping):
        raise InputError(f"{path}: expected an object, got {type(found).__name__}")
    return found
