"""Keys that may differ between the ranks of a run, or between a run and the one it continues."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from axonn_ext.data import Corpus, Examples
from axonn_ext.data.fingerprint import fingerprint
from axonn_ext.spec.stream import PREFIX as STREAM
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config import Config
from axonn_ext.train.config_file import toml_value
from axonn_ext.train.job import Job

if TYPE_CHECKING:
    from axonn_ext.data.stream_batches import Stream

# Keys that may differ between ranks, and why. All others are compared verbatim, and so are the
# settings except AXONN_CACHE_DIR (spec/settings.py), and the versions (ranks/meeting.py).
_ELSEWHERE = "the path may differ between hosts; the contents are compared"
MAY_DIFFER: Mapping[str, str] = {
    "data.text": _ELSEWHERE,
    "data.mixture": f"{_ELSEWHERE}, and so are the weights",
    "data.vocabulary": _ELSEWHERE,
    "model.pretrained": f"{_ELSEWHERE}, by from_pretrained",
    "lora.start": f"{_ELSEWHERE}, by load_adapter",
    "optim.offload_folder": "disks may be mounted elsewhere on each host",
    "train.samples": _ELSEWHERE,
    "train.device": "the resolved device is compared",
    "train.machine": "only rank 0 uses it, for the rates that it reports",
    "train.threads": "hosts may have different processors",
}
# Tables and keys that may differ between a run and the one that continues it.
_FREE_TABLES = ("grid", "parallel", "overlap", "pipeline", "checkpoint", "metrics")
_FREE_KEYS = {
    *("train.threads", "train.device", "train.verify", "train.compile", "train.eval_interval"),
    *("train.eval_batches", "train.micro_batches"),
    *("train.samples", "train.sample_tokens"),
    *("train.early_stop_patience", "train.early_stop_min_delta"),
    *("optim.zero", "optim.offload", "optim.bucket_elements", "optim.offload_folder"),
}
_EFFECTS = {  # how a change affects what is read
    "train.steps": ": the learning-rate schedule is computed for the new total",
    "train.batch_size": ": it continues with the sequences after those already read",
    "model.sequence_length": ": the text is cut anew, so that some of it is read again, some never",
}


def shared_values(job: Job, corpus: Corpus | Examples | Stream) -> dict[str, str]:
    """Returns the values that must be equal on all ranks, by the names used in messages.

    Raises UserError if a file of the corpus is damaged.
    """
    config, vocabulary = job.config, job.text.vocabulary
    keys = {
        f"{table}.{key}": toml_value(value)
        for table, values in as_json(config).items()
        for key, value in values.items()
    }
    try:
        text = fingerprint(corpus)
    except ValueError as error:
        raise UserError(f"{config.text_key}: {error}") from None
    return {
        "the command": "train",
        **{key: value for key, value in keys.items() if key not in MAY_DIFFER},
        "train.device": job.device,
        "whether model.pretrained is set": toml_value(bool(config.model.pretrained)),
        "whether lora.start is set": toml_value(bool(config.lora.start)),
        "the vocabulary": f"{vocabulary.num_tokens:,} tokens ({vocabulary.sha256})",
        "the model": repr(job.model),
        "the text": text,
        "the prompts of train.samples": "none" if job.samples is None else job.samples.digest,
    }


def as_json(config: Config) -> dict[str, Any]:
    """Returns the values of all keys by table, as in TOML: 0 stands for None."""

    def plain(value: Any) -> Any:
        if value is None:
            return 0
        return list(value) if isinstance(value, tuple) else value

    return dataclasses.asdict(
        config, dict_factory=lambda items: {key: plain(value) for key, value in items}
    )


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each key that affects the computation and has changed."""
    defaults = as_json(Config())
    for table, values in now.items():
        if table in _FREE_TABLES:
            continue
        for key, value in values.items():
            # A key that did not exist yet when the run was saved had the effect of its default.
            before = saved.get(table, {}).get(key, defaults[table][key])
            free = f"{table}.{key}" in _FREE_KEYS
            if key == "steps":
                free = not _ends_with_the_run(now["optim"])
            if not free and before != value:
                effect = _EFFECTS.get(f"{table}.{key}", "")
                if key == "sequence_length" and now["data"]["text"].startswith(STREAM):
                    effect = ": it continues with the tokens after those already read"
                yield (
                    f"{table}.{key} was {before!r} in the run that is continued, now {value!r}"
                    f"{effect}"
                )


def _ends_with_the_run(optim: Mapping[str, Any]) -> bool:
    """Whether the learning rate of a step depends on the number of steps."""
    falls = optim["schedule"] != "constant" and optim["final_lr_fraction"] != 1
    return falls or optim["warmup_fraction"] > 0
