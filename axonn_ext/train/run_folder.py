"""The folder of a run: what is in it, and that it overwrites nothing unasked."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from axonn_ext.terminal.errors import TrainingError, UserError
from axonn_ext.train.config import Config
from axonn_ext.train.config_file import to_toml
from axonn_ext.train.metrics import METRICS_FILE, TENSORBOARD_FOLDER

CONFIG_FILE = "config.toml"
LOSS_PICTURE = "loss.png"
PROFILE_FILE = "profile.json"
COMPARE_PICTURE = "compare.png"
_OURS = (CONFIG_FILE, METRICS_FILE, LOSS_PICTURE, COMPARE_PICTURE, PROFILE_FILE)


def default_folder(config_path: Path | None) -> Path:
    """runs/NAME-DATE-TIME, after the configuration file."""
    name = config_path.stem if config_path else "run"
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Raises UserError when the folder cannot become a run's without losing something."""
    try:
        _check_folder(folder, overwrite=overwrite)
    except OSError as error:  # a name that is too long, or a folder that may not be looked into
        raise UserError(f"--out {folder}: {error.strerror}") from None


def _check_folder(folder: Path, *, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: expected a folder, got a file")
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise UserError(
            f"--out {folder}: expected a new or empty folder, got one that holds files; "
            "use another name, or --overwrite to replace the run in it"
        )
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--out {folder}: cannot write in {existing}")
    # Where names may end in what is no folder on a disk, as in /proc, only trying tells.
    os.rmdir(tempfile.mkdtemp(prefix=".axonn_ext_", dir=existing))


def create_folder(folder: Path, config: Config) -> None:
    """Makes the folder and puts config.toml in it; files of an earlier run go, others stay."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _OURS:
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / TENSORBOARD_FOLDER, ignore_errors=True)
        (folder / CONFIG_FILE).write_text(to_toml(config), encoding="utf-8")
    except OSError as error:
        raise TrainingError(f"--out {folder}: cannot write there: {error.strerror}") from None
