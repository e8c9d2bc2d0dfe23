"""The checkpoints of a training run: when they are saved, and how a run resumes from one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from axonn_ext.checkpoint import CheckpointError, Saver, load
from axonn_ext.checkpoint.folder import CHECKPOINTS, CheckpointFolder, find_checkpoint
from axonn_ext.checkpoint.reading import read_manifest
from axonn_ext.checkpoint.saver import Saved
from axonn_ext.optim import AdamW, LossScaler
from axonn_ext.spec.files.errors import first_of
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.optimizer import ADAMW
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config import AUTO, Config
from axonn_ext.train.differences import as_json, differences
from axonn_ext.train.export import ORIGINS, Origins
from axonn_ext.train.job import Job

if TYPE_CHECKING:
    from axonn_ext.data.stream_batches import StreamBatches
    from axonn_ext.train.early_stop import EarlyStop

FAREWELL_SECONDS = 10.0
# Keys in a checkpoint's `extra`, next to those of `export`: the scaler's state, the number of
# sequences read, the best evaluation, and the place in a stream.
_LOSS_SCALER, _SEQUENCES, _EARLY_STOP, _STREAM = "loss_scaler", "sequences", "early_stop", "stream"


def find_resumed(config: Config, folder: Path) -> str:
    """Returns the checkpoint from which a run resumes; "" if there is none.

    Raises UserError if the requested one does not exist, or with AUTO if there are checkpoints but
    none can be read.
    """
    asked = config.checkpoint.resume
    checkpoints = CheckpointFolder(folder / CHECKPOINTS)
    try:
        if asked == AUTO:
            checkpoints.recover()
        if not asked or (asked == AUTO and not checkpoints.steps()):
            return ""
        return str(find_checkpoint(folder if asked == AUTO else Path(asked)).resolve())
    except (CheckpointError, OSError) as error:
        raise UserError(f"checkpoint.resume: {error}") from None


def _other_keys(path: Path, job: Job) -> Iterator[str]:
    """Yields a phrase for each key of model and optimizer that makes a checkpoint unfit."""
    try:
        extra = read_manifest(path).extra
        saved, optim = ModelConfig(**extra["model"]), extra["config"]["optim"]
        name, groups = optim.get("name", ADAMW), len(optim.get("groups", ()))
    except (AttributeError, CheckpointError, KeyError, TypeError, ValueError):
        return
    for key, here in dataclasses.asdict(job.model).items():
        there = getattr(saved, key)
        if there != here:
            yield f"{key} is {there} in the checkpoint, {here} here"
    own = job.config.optim
    if name != own.name:
        yield f"optim.name is {name} in the checkpoint, {own.name} here"
    if groups != len(own.groups):
        yield f"optim.groups has {groups} in the checkpoint, {len(own.groups)} here"


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Where a run resumes: the step and the grid of the saved run.

    shift: number of sequences read so far beyond what the same number of steps would read now
    (data.Batches). notes: differences from the saved run.
    """

    step: int
    shift: int
    grid: GridShape
    notes: list[str]


class RunCheckpoints:
    """Saves a run's checkpoints as configured, and reads the one it resumes from.

    say: shows a line to the user; set on rank 0 only.
    """

    def __init__(
        self, job: Job, folder: Path, *, module: nn.Module, optimizer: AdamW,
        scaler: LossScaler | None, early_stop: EarlyStop | None, stream: StreamBatches | None,
        say: Callable[[str], None] | None,
    ) -> None:  # fmt: skip
        self._job, self._module, self._optimizer = job, module, optimizer
        self._scaler, self._early_stop, self._stream = scaler, early_stop, stream
        self._say = say
        table = job.config.checkpoint
        self._interval, self._shift = table.interval, 0
        self._saver: Saver | None = None
        if table.interval:
            self._saver = Saver(
                folder / CHECKPOINTS, keep_last=table.keep_last, keep_every=table.keep_every,
                background=table.background, on_saved=self._show,
            )  # fmt: skip

    def resume(self, path: Path) -> Resumed:
        """Reads a checkpoint. Raises UserError if it is damaged or belongs to another model."""
        try:
            extra = load(path, model=self._module, optimizer=self._optimizer, options=False)
        except CheckpointError as error:
            others = first_of(list(_other_keys(path, self._job)))
            summary = f"{others}: " if others else ""
            raise UserError(f"checkpoint.resume: {summary}{error}") from None
        try:
            step, saved = int(extra["step"]), extra["config"]
            grid = GridShape(**saved["grid"])
            read = int(extra.get(_SEQUENCES, step * saved["train"]["batch_size"]))
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"checkpoint.resume: {path} was not saved by axonn-ext train: it has no step"
            ) from None
        # A run in another dtype has left no loss scale: this one starts with the configured one.
        if self._scaler is not None and _LOSS_SCALER in extra:
            try:
                self._scaler.load_state_dict(extra[_LOSS_SCALER])
            except ValueError as error:
                raise UserError(f"checkpoint.resume: {path}: {error}") from None
        if self._early_stop is not None and _EARLY_STOP in extra:
            try:
                self._early_stop.load_state_dict(extra[_EARLY_STOP])
            except ValueError as error:
                raise UserError(f"checkpoint.resume: {path}: {error}") from None
        config = self._job.config
        self._shift = read - step * config.train.batch_size
        notes = list(differences(saved, as_json(config)))
        if self._stream is not None and not self._stream.load_state_dict(extra.get(_STREAM, {})):
            notes.append("the stream is read from its beginning: the run before read another one")
        return Resumed(step, self._shift, grid, notes)

    def after_step(self, done: int, *, last: bool) -> None:
        """Saves after a step if a checkpoint is due. Reports an earlier save that failed."""
        if self._saver is None or not (last or done % self._interval == 0):
            return
        extra: dict[str, Any] = {
            "step": done,
            "model": dataclasses.asdict(self._job.model),
            "config": as_json(self._job.config),
            ORIGINS: dataclasses.asdict(Origins.of(self._job)),
            _SEQUENCES: done * self._job.config.train.batch_size + self._shift,
        }
        if self._scaler is not None:
            extra[_LOSS_SCALER] = self._scaler.state_dict()
        if self._early_stop is not None:
            extra[_EARLY_STOP] = self._early_stop.state_dict()
        if self._stream is not None:
            extra[_STREAM] = self._stream.state_dict()
        shape = self._job.config.grid
        facts = {"grid": str(shape), "ranks": shape.size}
        self._settle(self._saver.wait)
        save = partial(
            self._saver.save, done, model=self._module, optimizer=self._optimizer, extra=extra,
            facts=facts,
        )  # fmt: skip
        save() if last else self._settle(save)

    def _settle(self, saving: Callable[[], None]) -> None:
        try:
            saving()
        except CheckpointError as error:
            if self._say is not None:
                self._say(f"no checkpoint was written: {error}; training goes on")

    def close(self) -> None:
        """Waits for the last save. Raises CheckpointError if it failed."""
        if self._saver is not None:
            self._saver.wait()

    def close_after_failure(self) -> None:
        """Waits briefly for a save in progress: a peer may never write its part."""
        if self._saver is not None:
            with suppress(Exception):  # the error of the run is the one to show
                self._saver.wait(FAREWELL_SECONDS)

    def _show(self, saved: Saved) -> None:
        if self._say is not None:
            self._say(
                f"{saved.step:>7}  checkpoint: {saved.num_bytes / 1e6:,.1f} MB in "
                f"{saved.seconds:.1f} s, {saved.path}"
            )
