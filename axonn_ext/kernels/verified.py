"""The results of `axonn-ext verify`: which kernels are correct on GPUs of this kind.

Each key has a file, a stamp, in AXONN_CACHE_DIR (format: docs/interfaces.md). Without a stamp,
"auto" measures neither `fused` nor `fused_sm90` on GPUs. A kernel that has failed is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from axonn_ext.spec.settings import PRODUCT_KERNELS

FORMAT = 1
FUSED = "fused"
KERNELS = (FUSED, *PRODUCT_KERNELS)
# A kernel that reads a wrong address or hangs kills the process. These two are our own, so "auto"
# measures them only after they are verified (or, for fused_sm90, if the user asks for it).
LOCKED = (FUSED, "fused_sm90")


@dataclass(frozen=True)
class Key:
    """The machine and software for which a stamp is valid."""

    gpu: str  # the model of the GPU
    driver: str
    torch: str
    nccl: str
    triton: str  # empty if it is not installed
    axonn_ext: str  # the version, and a checksum of the CUDA modules and Triton kernels


@dataclass(frozen=True)
class Verdict:
    """The result for a kernel.

    ranks    the most GPUs on which it ran together, with one rank on each; 1: only a single GPU
    reasons  group of cases -> why it failed; empty if none failed
    """

    ranks: int = 1
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Stamp:
    """The results on one kind of GPU, without kernels that were not run.

    complete    whether a run with all groups has completed; False if it was cut short, or if only
                some groups were requested
    """

    key: Key
    verdicts: Mapping[str, Verdict]
    complete: bool = True


@dataclass(frozen=True)
class Unlocked:
    """The kernels that "auto" may measure on the GPUs of this machine."""

    product_kernels: tuple[str, ...]
    unverified: tuple[str, ...]  # product kernels that may be measured once they are verified
    fused_ranks: int  # the most ranks with which "fused" may be measured; 0: none
    suggest_verify: bool  # whether there is no result for one of LOCKED


def path_of(cache_dir: str | Path, key: Key) -> Path:
    """Returns the file of the stamp of a key: <cache_dir>/verify/v1/<hash of key>.json."""
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()
    return Path(cache_dir) / "verify" / f"v{FORMAT}" / f"{digest[:16]}.json"


def any_kept(cache_dir: str) -> bool:
    """Whether there may be a stamp of any key."""
    return bool(cache_dir) and (Path(cache_dir) / "verify" / f"v{FORMAT}").is_dir()


def keep(cache_dir: str | Path, stamp: Stamp) -> Path:
    """Writes the stamp and replaces an older one, as a whole or not at all. Raises OSError."""
    path = path_of(cache_dir, stamp.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".stamp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(encode(stamp))
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def merged(
    old: Mapping[str, Verdict], new: Mapping[str, Verdict], *, passed: Collection[str]
) -> dict[str, Verdict]:
    """Returns the verdicts after another run; kernels that did not run keep their verdicts.

    new     the verdicts of that run. A failure replaces a pass. A pass on fewer GPUs does not
            replace one on more
    passed  the groups of cases that passed in that run. Failures of other groups are kept
    """
    found = {**old, **new}
    for name in old.keys() & new.keys():
        before, now = old[name], new[name]
        reasons = {group: why for group, why in before.reasons.items() if group not in passed}
        ranks = max(before.ranks, now.ranks) if before.passed and now.passed else now.ranks
        found[name] = replace(now, ranks=ranks, reasons=reasons | dict(now.reasons))
    return found


def find(cache_dir: str | Path, key: Key) -> Stamp | None:
    """Returns the stamp of that key; None if there is none, or if it is damaged."""
    try:
        stamp = decode(path_of(cache_dir, key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stamp if stamp.key == key else None


def encode(stamp: Stamp) -> str:
    """Returns the stamp as JSON."""
    document = {
        "format": FORMAT,
        "key": asdict(stamp.key),
        "complete": stamp.complete,
        **as_document(stamp.verdicts),
    }
    return json.dumps(document, indent=1) + "\n"


def as_document(verdicts: Mapping[str, Verdict]) -> dict[str, Any]:
    """Returns {"kernels": ...}, as it is written to JSON."""
    return {
        "kernels": {
            name: {"passed": v.passed, "ranks": v.ranks, "reasons": dict(v.reasons)}
            for name, v in verdicts.items()
        }
    }


def decode(text: str) -> Stamp:
    """Reads a stamp from JSON. Raises ValueError for anything but a whole stamp."""
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']!r}")
        key = Key(**{f.name: _text(document["key"][f.name]) for f in fields(Key)})
        verdicts = {name: _verdict(v) for name, v in document["kernels"].items()}
        complete = document["complete"]
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a stamp: {type(error).__name__}: {error}") from None
    if type(complete) is not bool:
        raise ValueError(f"complete {complete!r}")
    return Stamp(key, verdicts, complete)


def unlocked(asked: Sequence[str] | None, stamps: Sequence[Stamp | None]) -> Unlocked:
    """Returns the kernels that may be measured, given AXONN_PRODUCT_KERNELS (None: not set).

    stamps  the stamp of each model of the machine's GPUs; None for a model without one. A kernel
            that has failed on one model is excluded, and one that must be verified must have passed
            on all of them
    """
    found = [dict(stamp.verdicts) if stamp else {} for stamp in stamps]
    failed = {name for verdicts in found for name, v in verdicts.items() if not v.passed}
    passed = {name for name in KERNELS if found and all(name in v for v in found)} - failed
    usual = [name for name in PRODUCT_KERNELS if name in passed or name not in LOCKED]
    unknown = [name for name in LOCKED if found and name not in passed | failed]
    ranks = min((v[FUSED].ranks for v in found), default=0) if FUSED in passed else 0
    return Unlocked(
        product_kernels=tuple(k for k in (usual if asked is None else asked) if k not in failed),
        unverified=tuple(k for k in unknown if k != FUSED and asked is None),
        fused_ranks=ranks,
        suggest_verify=bool(unknown),
    )


def _verdict(document: Mapping[str, Any]) -> Verdict:
    ranks, reasons = document["ranks"], document["reasons"]
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"ranks {ranks!r}")
    verdict = Verdict(ranks, {_text(name): _text(why) for name, why in reasons.items()})
    if document["passed"] is not verdict.passed:
        raise ValueError("passed, with reasons why not" if reasons else "failed, for no reason")
    return verdict


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not a text: {value!r}")
    return value
