"""Copies a tokenizer, and the ids that end texts, into the folder of a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from axonn_ext.data.tokenizer_files import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    MORE_TEMPLATES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TokenizerFiles,
    stop_ids,
)
from axonn_ext.data.vocabulary import BYTES
from axonn_ext.spec.files.files import is_file, is_folder, read_json
from axonn_ext.spec.model_files import SPECIAL_IDS

# The files next to tokenizer.json, all of them small, and a folder of more templates.
_BESIDE = (
    TOKENIZER_CONFIG, "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", CHAT_TEMPLATE, MORE_TEMPLATES,
)  # fmt: skip


def copy_tokenizer(folder: Path, *, like: Path | None, tokenizer: str | Path | None) -> None:
    """Copies the tokenizer of `like`, or the one named, and generation_config.json of `like`.

    tokenizer: a file of the tokenizers library; "bytes": none is copied. Raises OSError.
    """
    if like is not None:
        _copy(like, (GENERATION_CONFIG,), folder)
    if tokenizer is None and like is not None:
        _copy(like, (TOKENIZER, *_BESIDE), folder)
    elif tokenizer is not None and str(tokenizer) != BYTES:
        shutil.copyfile(tokenizer, folder / TOKENIZER)
        _copy(Path(tokenizer).parent, _BESIDE, folder)
        if not is_file(folder / TOKENIZER_CONFIG):  # else transformers uses the family's own class
            text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n"
            (folder / TOKENIZER_CONFIG).write_text(text, encoding="utf-8")


def special_ids(
    folder: Path, described: Mapping[str, Any], *, like: Path | None
) -> dict[str, Any]:  # fmt: skip
    """Returns the keys of config.json for the ids that begin and end texts of a folder's model.

    described: the config.json so far. If neither it nor a file of `like` names an id that ends
    texts, the id of the tokenizer in the folder is used. Unknown ids are null, since transformers
    would otherwise use the ids of the family's first model.
    """
    found: dict[str, Any] = {}
    if like is None:
        found = {key: None for key in SPECIAL_IDS if key not in described}
    ends = stop_ids(like) if like is not None else described.get("eos_token_id")
    if ends in (None, []):
        end = TokenizerFiles.of(folder).special.get("eos_token")
        found.update(("eos_token_id", token) for text, token in _added(folder) if text == end)
    return found


def _copy(source: Path, names: Iterable[str], folder: Path) -> None:
    for name in names:
        if is_file(source / name):
            shutil.copyfile(source / name, folder / name)
        elif is_folder(source / name):
            shutil.copytree(source / name, folder / name)


def _added(folder: Path) -> Iterable[tuple[str, int]]:
    """Yields a tokenizer's added tokens with their ids."""
    described = read_json(folder / TOKENIZER) if is_file(folder / TOKENIZER) else {}
    for token in described.get("added_tokens", ()):
        yield token["content"], token["id"]
