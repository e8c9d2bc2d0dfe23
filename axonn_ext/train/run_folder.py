"""Creates the folder of a run, and overwrites nothing unless requested."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from torch.distributed import Store

from axonn_ext.checkpoint.folder import CHECKPOINTS
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.stores import file_name
from axonn_ext.spec.files.files import FileError, open_new, read_toml
from axonn_ext.terminal.errors import TrainingError, UserError
from axonn_ext.train.claim import CLAIM
from axonn_ext.train.config import AUTO, Config
from axonn_ext.train.config_file import to_toml
from axonn_ext.train.metrics import METRICS_FILE, TENSORBOARD_FOLDER
from axonn_ext.train.watchdog.summary import HANGS

CONFIG_FILE = "config.toml"
LOSS_PICTURE = "loss.png"
PROFILE_FILE = "profile.json"
MEMORY_FILE = "memory.pickle"  # next to it, for GPUs
COMPARE_PICTURE = "compare.png"
MODEL, ADAPTER = "model", "adapter"  # the folder that a run of a pretrained model writes at its end
_RECORDS = (METRICS_FILE, "wandb.json", "mlflow.json")  # of all steps; the last two of train.sinks
_OURS = (CONFIG_FILE, *_RECORDS, LOSS_PICTURE, COMPARE_PICTURE, PROFILE_FILE, MEMORY_FILE)


def default_folder(config_path: Path | None) -> Path:
    """Returns runs/NAME-DATE-TIME, with the name of the configuration file."""
    name = config_path.stem if config_path else "run"
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def check_folder(folder: Path, *, overwrite: bool, resumes: bool = False) -> None:
    """Raises UserError if the folder cannot be used for a run without losing files.

    resumes: the run may continue in the folder of an earlier run that saved checkpoints.
    """
    try:
        _check_folder(folder, overwrite=overwrite or (resumes and _saves(folder)), resumes=resumes)
    except OSError as error:  # the name is too long, or the folder is not readable
        raise UserError(f"--out {folder}: {error.strerror}") from None


def check_inputs(config: Config, folder: Path) -> None:
    """Raises UserError if an input of the run lies in the folder that it writes."""
    for key, name in (
        ("model.pretrained", config.model.pretrained),
        ("lora.start", config.lora.start),
    ):
        try:
            inside = name and Path(name).resolve().is_relative_to(folder.resolve())
        except (OSError, RuntimeError):
            continue  # a name that cannot be resolved is refused where it is read
        if inside:
            raise UserError(f"{key} {name}: expected a folder outside of the run's own, {folder}")


def _saves(folder: Path) -> bool:
    """Whether the run in a folder has checkpoints, or ended before its first one."""
    if (folder / CHECKPOINTS).is_dir():
        return True
    try:
        return bool(read_toml(folder / CONFIG_FILE)["checkpoint"]["interval"])
    except (FileError, KeyError, TypeError):
        return False


def _check_folder(folder: Path, *, overwrite: bool, resumes: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: expected a folder, got a file")
    if not overwrite and folder.is_dir() and any(path.name != CLAIM for path in folder.iterdir()):
        expected, got = "a new or empty folder", "one that holds files"
        if resumes:
            expected += ", or a run with checkpoints, to resume from"
            if (folder / CONFIG_FILE).is_file():
                got = "a run without any checkpoint"
        raise UserError(
            f"--out {folder}: expected {expected}, got {got}; "
            "use another name, or --overwrite to replace the run in it"
        )
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--out {folder}: cannot write in {existing}")
    # The folder may lie in a special file system, such as /proc, so try to write.
    os.rmdir(tempfile.mkdtemp(prefix=".axonn_ext_", dir=existing))


def first_day(config: Config, folder: Path) -> str:
    """Returns the date on which the run in a folder, or the run that it continues, began.

    A run that begins now gets the UTC date, which is the same on all hosts.
    """
    resume = config.checkpoint.resume
    path = folder if resume == AUTO else Path(resume)
    for run in (path, *path.parents[:2]) if resume else ():  # a run, or a checkpoint in it
        try:
            if found := str(read_toml(run / CONFIG_FILE)["data"]["date"]):
                return found
        except (FileError, KeyError, TypeError):
            continue
    return datetime.now(UTC).date().isoformat()


def folder_of_rank_0(store: Store, here: Process, folder: Path) -> Path:
    """Returns the folder of rank 0, whose name may contain a different time than this rank's.

    Raises: UserError if it has another parent folder.
    """
    found = Path(process.settled_by_rank_0(store, here, lambda: str(folder), topic="folder"))
    if found.parent != folder.parent:
        raise UserError(
            f"--out: rank 0 writes to {found}, but rank {here.rank} has {folder}: give all ranks "
            "the same folder"
        )
    return folder.with_name(file_name(found.name)) if found.name else folder


def create_folder(folder: Path, config: Config, *, resumes: bool = False) -> None:
    """Creates the folder with config.toml; removes files of an earlier run, but no others.

    resumes: the run continues in that folder, so metrics and checkpoints stay.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _OURS:
            if not (resumes and name in _RECORDS):
                (folder / name).unlink(missing_ok=True)
        if not resumes:
            for name in (TENSORBOARD_FOLDER, "wandb", CHECKPOINTS, HANGS, MODEL, ADAPTER):
                shutil.rmtree(folder / name, ignore_errors=True)
        with open_new(folder / CONFIG_FILE) as file:
            file.write(to_toml(config).encode())
    except OSError as error:
        raise TrainingError(f"--out {folder}: cannot write there: {error.strerror}") from None
