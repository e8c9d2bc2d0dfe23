"""The folder in which a run keeps its checkpoints: step-00000100, step-00000200, ..., latest."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from axonn_ext.checkpoint.errors import CheckpointError
from axonn_ext.checkpoint.files import find_problems, remove, write_text
from axonn_ext.checkpoint.manifest import MANIFEST
from axonn_ext.checkpoint.reading import read_manifest

LATEST = "latest"
CHECKPOINTS = "checkpoints"  # the folder's name in the folder of a run
_STEP = re.compile(r"step-(\d{8,15})")


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Returns the folder of a step's checkpoint."""
        return self.root / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint with a manifest, in order."""
        found = []
        if self.root.is_dir():
            for path in self.root.iterdir():
                match = _STEP.fullmatch(path.name)
                if match and (path / MANIFEST).is_file():
                    found.append(int(match[1]))
        return sorted(found)

    def latest(self) -> Path | None:
        """Returns the newest checkpoint whose manifest can be read; None if there is none.

        The file `latest` names it, unless that file is lost or damaged.
        """
        try:
            name = (self.root / LATEST).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            name = ""
        named = [self.root / name] if _STEP.fullmatch(name) else []
        for path in (*named, *(self.path(step) for step in reversed(self.steps()))):
            try:
                read_manifest(path)
            except CheckpointError:
                continue
            return path
        return None

    def recover(self) -> None:
        """Restores the name of a checkpoint that a job was replacing when it ended.

        Only the job that writes into the folder may call it. Raises OSError.
        """
        for old in self.root.glob(".step-*.replaced.partial"):
            path = old.with_name(old.name.removeprefix(".").partition(".")[0])
            if (old / MANIFEST).is_file() and not os.path.lexists(path):
                old.rename(path)

    def mark_latest(self, step: int) -> None:
        """Marks a checkpoint that is on disk as the latest one. Raises OSError."""
        write_text(self.root / LATEST, self.path(step).name + "\n")

    def prune(
        self, step: int, *, keep_last: int, keep_every: int,
        beat: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Removes old checkpoints after the checkpoint of `step` was saved.

        Of the checkpoints up to `step`, the newest `keep_last` stay, and those at multiples of
        `keep_every` steps (0: none). Later ones stay, which exist if the run was resumed from an
        earlier step; so do links, since their targets are kept elsewhere on purpose. Checkpoints
        that an ended job left half written are removed. beat: called for each file removed.
        """
        for partial in self.root.glob(".step-*.partial"):
            remove(partial, beat=beat)
        steps = [each for each in self.steps() if each <= step]
        for old in steps[: max(0, len(steps) - keep_last)]:
            is_kept = keep_every and old % keep_every == 0
            if not is_kept and not self.path(old).is_symlink():
                # Under this name, a half-removed folder does not count as a checkpoint.
                pruned = self.root / f".{self.path(old).name}.pruned.partial"
                self.path(old).rename(pruned)
                remove(pruned, beat=beat)


def replaced_path(path: Path) -> Path:
    """Returns where a checkpoint lies while a new one takes its name."""
    return path.with_name(f".{path.name}.replaced.partial")


def find_checkpoint(path: Path) -> Path:
    """Returns the checkpoint that a path refers to.

    The path may be a checkpoint, a folder of several, or the folder of a run; of several, the
    latest is taken. Raises CheckpointError if there is none.
    """
    if (path / MANIFEST).is_file() or _STEP.fullmatch(path.name):
        return path
    for root in (path, path / CHECKPOINTS):
        latest = CheckpointFolder(root).latest()
        if latest is not None:
            return latest
    what = "a folder without any checkpoint" if path.is_dir() else "no folder"
    raise CheckpointError(
        f"{path}: expected a checkpoint, or a folder of checkpoints, or of a run, got {what}"
    )


def last_good(damaged: Path, *, beat: Callable[[], None] = lambda: None) -> Path | None:
    """Returns the newest undamaged checkpoint in the folder of a damaged one; None if none is.

    beat: called for each extent that is read.
    """
    folder = CheckpointFolder(damaged.parent)
    for path in (folder.path(step) for step in reversed(folder.steps())):
        try:
            if path.name != damaged.name and not any(
                find_problems(path, read_manifest(path), beat=beat)
            ):
                return path
        except CheckpointError:
            continue
    return None
