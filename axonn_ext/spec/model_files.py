"""Loads models by name, from the trainer's TOML file, or from a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axonn_ext.spec.config_json import values_of
from axonn_ext.spec.family import FAMILIES, find_family
from axonn_ext.spec.files.errors import InputError, unknown
from axonn_ext.spec.files.files import FileError, is_file, is_folder, read_json
from axonn_ext.spec.files.keys import keys_of
from axonn_ext.spec.files.tables import Table, read_table
from axonn_ext.spec.files.token_files import find_token_files
from axonn_ext.spec.model import DEFAULT_MODEL, ModelConfig, ModelSizes
from axonn_ext.spec.optimizer import OptimizerOptions
from axonn_ext.spec.presets import PRESETS

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_model(name: str, *, sequence_length: int | None = None) -> tuple[str, ModelConfig]:
    """Returns a name for a model, and the model.

    name: a preset, a trainer's TOML file with a table [model], or a Hugging Face folder with a
    config.json for one of the families of spec/family.py. sequence_length: default that of the
    preset or file.

    Raises InputError, which says what is wrong and what is available.
    """
    path = Path(name)
    if name in PRESETS:
        label, model = name, PRESETS[name]
    elif path.suffix == ".toml":
        label, model = path.stem, _from_trainer(path)
    elif is_folder(path):
        label, model = path.resolve().name, read_config(path / "config.json")
    elif path.suffix == ".json":
        model = read_config(path)  # refuses paths that `resolve` would fail for
        label = path.resolve().parent.name
    else:
        error = unknown("model", name, PRESETS)
        raise InputError(f"{error}; or a TOML file, or a Hugging Face folder that exists")
    if sequence_length is None:
        return label, model
    if isinstance(sequence_length, bool) or sequence_length < 1:
        raise InputError(f"sequence_length must be a whole number >= 1, got {sequence_length!r}")
    return label, dataclasses.replace(model, sequence_length=sequence_length)


def load_optimizer(name: str) -> OptimizerOptions:
    """Returns where a trainer's TOML file places AdamW's state; for other models, the default.

    Raises InputError for values that the trainer would also refuse.
    """
    if name in PRESETS or Path(name).suffix != ".toml":
        return OptimizerOptions()
    whole = read_table(Path(name))
    if not whole.has("optim"):
        return OptimizerOptions()
    try:
        return OptimizerOptions(**_read(whole.table("optim"), OptimizerOptions))
    except ValueError as error:
        raise InputError(f"{name}: optim.{error}") from None


# --- The trainer's file --------------------------------------------------------------------------


def _from_trainer(path: Path) -> ModelConfig:
    """Reads the table [model]: the keys of ModelConfig, with 0 for None, and two of the trainer.

    The latter are `implementation`, and `pretrained`, a folder that decides all but
    sequence_length.
    """
    whole = read_table(path)
    table = whole.table("model")
    pretrained = table.text("pretrained", "")
    table = table.without(["implementation", "pretrained"])
    vocab_size = table.count("vocab_size", 0, least=0)
    table = table if vocab_size else table.without(["vocab_size"])
    values = dataclasses.asdict(DEFAULT_MODEL) | _read(table, ModelSizes)
    if pretrained:
        model = read_config(Path(pretrained) / "config.json")
        length = min(values["sequence_length"], model.sequence_length)
        return dataclasses.replace(model, sequence_length=length)
    if vocab_size == 0:
        data = whole.table("data") if whole.has("data") else Table({}, "data", str(path))
        if data.text("vocabulary", "bytes") not in ("", "bytes") or _has_tokens(data):
            raise InputError(
                f"{path}: model.vocab_size is 0, so the tokenizer would decide it: the planner "
                "needs the number (what the training run prints, a multiple of 128)"
            )
    table.finish()
    return _model(table, **values)


def _read(table: Table, options: type) -> dict[str, Any]:
    """Returns the options that the table has. Raises InputError for illegal values."""
    return table.read({name: key.read for name, key in keys_of(options).items()})


def _has_tokens(data: Table) -> bool:
    """Whether the trainer reads tokens, which then decide the vocabulary."""
    name = data.text("text", "")
    if data.text("mixture", "") or not name:
        return bool(data.text("mixture", ""))
    if is_folder(Path(name)):
        return is_file(Path(name) / "state.json")
    return find_token_files(Path(name)) is not None


def _model(table: Table, **values: Any) -> ModelConfig:
    """Returns a ModelConfig; its errors are raised as InputError with the file's name."""
    try:
        return ModelConfig(**values)
    except ValueError as error:
        raise InputError(f"{table.file}: {error}") from None


# --- Hugging Face --------------------------------------------------------------------------------


def read_config(path: Path) -> ModelConfig:
    """Reads a Hugging Face config.json. Raises InputError, also for models different from ours."""
    try:
        content = read_json(path)
    except FileError as error:
        if not isinstance(error.__context__, FileNotFoundError):
            raise
        missing = f"{path.parent}: expected a folder with {path.name}{_remedy(path.parent)}"
        raise InputError(missing) from None
    try:
        content = text_model(content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    whole = Table(content, "", str(path))
    kind = whole.without_nulls().text("model_type")
    known = [find_family(name) for name in FAMILIES]
    if found := [family for family in known if family.hugging_face.describes(content)]:
        family = found[-1]
        return _model(whole.without_nulls(), family=family.name, **values_of(family, whole))
    names = ", ".join(dict.fromkeys(family.hugging_face.model_type for family in known))
    raise InputError(
        f"{path}: model_type {kind!r} is not supported; supported: {names} "
        "(the families of axonn_ext.models)"
    )


def text_model(content: Any) -> Any:
    """Returns the part of a config.json that describes the text model: all of it, in most models.

    The ids of special tokens are those of the whole. Raises InputError if the part is missing.
    """
    if not isinstance(content, Mapping):
        return content
    for name in FAMILIES:
        theirs = find_family(name).hugging_face
        if theirs.multimodal and content.get("model_type") == theirs.multimodal.model_type:
            text = content.get("text_config")
            if not isinstance(text, Mapping):
                kind = theirs.multimodal.model_type
                raise InputError(f"text_config: expected a table, since model_type is {kind!r}")
            ids = {key: content[key] for key in SPECIAL_IDS if key in content}
            return {**text, **ids, "model_type": theirs.model_type}
    return content


def _remedy(folder: Path) -> str:
    """Returns what to do about a folder without a config.json; "" if that is not clear."""
    if is_file(folder / "adapter_config.json"):
        return "; it has an adapter, which goes on top of a model: --model MODEL --adapter FOLDER"
    if is_file(folder / "model" / "config.json"):
        return f"; the model is in {folder / 'model'}"
    if is_file(folder / "metrics.jsonl"):
        return (
            "; it is the folder of a run: `axonn-ext checkpoint export` writes such a folder from "
            "its checkpoints"
        )
    if not folder.is_absolute() and len(folder.parts) == 2 and not folder.exists():
        return f"; to download a model: hf download {folder} --local-dir {folder.name}"
    return ""
