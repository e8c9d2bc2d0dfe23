"""What must be equal on all ranks of a run, and in which keys ranks may differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from axonn_ext.data import Corpus, Examples
from axonn_ext.data.fingerprint import fingerprint
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config import Config
from axonn_ext.train.config_file import toml_value
from axonn_ext.train.job import Job

# Keys that may differ between ranks, and why. All others are compared as they stand, and so are the
# settings but AXONN_CACHE_DIR (axonn_ext.settings), and the versions (axonn_ext.meeting).
_ELSEWHERE = "the path may differ between hosts; the contents are compared"
MAY_DIFFER: Mapping[str, str] = {
    "data.text": _ELSEWHERE,
    "data.mixture": f"{_ELSEWHERE}, and so are the weights",
    "data.vocabulary": _ELSEWHERE,
    "model.pretrained": f"{_ELSEWHERE}, by from_pretrained",
    "lora.start": f"{_ELSEWHERE}, by load_adapter",
    "optim.offload_folder": "disks may be mounted elsewhere on each host",
    "train.device": "the resolved device is compared",
    "train.machine": "only rank 0 uses it, for the rates that it reports",
    "train.threads": "hosts may have different processors",
}


def shared_values(job: Job, corpus: Corpus | Examples) -> dict[str, str]:
    """Returns what must be equal on all ranks, by the names that messages show.

    Raises UserError if a file of the corpus is damaged.
    """
    config = job.config
    try:
        text = fingerprint(corpus)
    except ValueError as error:
        raise UserError(f"data.{'mixture' if config.data.mixture else 'text'}: {error}") from None
    return {
        "the command": "train",
        **{key: value for key, value in _keys_of(config).items() if key not in MAY_DIFFER},
        "train.device": job.device,
        "whether model.pretrained is set": toml_value(bool(config.model.pretrained)),
        "whether lora.start is set": toml_value(bool(config.lora.start)),
        "the vocabulary": f"{job.vocabulary.num_tokens:,} tokens ({job.vocabulary.sha256})",
        "the model": repr(job.model),
        "the text": text,
    }


def _keys_of(config: Config) -> dict[str, str]:
    """Returns the values of all keys, as TOML has them."""
    return {
        f"{table.name}.{key.name}": toml_value(getattr(getattr(config, table.name), key.name))
        for table in dataclasses.fields(config)
        for key in dataclasses.fields(getattr(config, table.name))
    }
