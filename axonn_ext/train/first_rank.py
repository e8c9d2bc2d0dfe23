"""Rank 0's output and files of a run. Other ranks do not load this."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from axonn_ext.terminal.console import Console, say
from axonn_ext.terminal.files import writing
from axonn_ext.train.checkpoints import Resumed
from axonn_ext.train.config import AUTO, Config
from axonn_ext.train.metrics import (
    METRICS_FILE,
    MetricsFile,
    MetricsSink,
    TensorBoard,
    read_metrics,
)
from axonn_ext.train.plot import plot_loss
from axonn_ext.train.run import Audience, Run
from axonn_ext.train.run_folder import (
    ADAPTER,
    LOSS_PICTURE,
    MEMORY_FILE,
    PROFILE_FILE,
    create_folder,
)
from axonn_ext.train.terminal import Terminal, describe_grid, duration, print_header
from axonn_ext.train.trainer import Trainer

_MOST_INITIAL = 0.1  # of the initial weights in an average, without a note


class User(Audience):
    """Shows the user the progress of the run, and writes its files and the plot."""

    def __init__(self, run: Run, *, profile: bool) -> None:
        self._run, self._job, self._folder, self._console = run, run.job, run.folder, Console()
        self._tell = self.say = partial(say, self._console)
        self.profile = run.folder / PROFILE_FILE if profile else None
        self._before: int | None = None  # number of steps done before `steps`
        self._seconds = 0.0

    def begins(self) -> None:
        run, folder = self._run, self._folder
        average = _note_of_average(self._job.config)
        for note in filter(None, (*run.notes, average)):  # not earlier: the files may not fit
            self._tell(note)
        print_header(
            self._console, self._job, run.corpus, threads=run.threads, folder=str(folder),
            ranks_of_host=run.here.local_world_size,
        )  # fmt: skip

    def resumed(self, path: Path, resumed: Resumed) -> None:
        here = Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        self._tell(f"resumed  step {resumed.step:,} of a run on {resumed.grid}, from {shown}")
        for note in resumed.notes:
            self._tell(f"         {note}")
        self._tell("")

    def starts(self) -> None:
        run, folder = self._run, self._folder
        continues = run.resumed is not None and folder.resolve() in run.resumed.parents
        create_folder(folder, self._job.config, resumes=continues)

    def nothing_left(self, why: str) -> None:
        self._tell(f"nothing is left to do: {why}")

    def compiles(self) -> None:
        self._tell("compiling the blocks with torch.compile, which can take a minute")

    def warmed_up(self, num_measured: int, seconds: float) -> None:
        done = ["compiled the blocks"] if self._job.config.train.compile else []
        if num_measured:
            done.append(f"measured the algorithms of {num_measured} ops")
        if done:
            self._tell(f"warm-up: {' and '.join(done)} in {seconds:.1f} s")

    @contextmanager
    def steps(self, trainer: Trainer) -> Iterator[Sequence[MetricsSink]]:
        sinks: list[MetricsSink] = [
            MetricsFile(self._folder, first_step=trainer.steps_done),
            Terminal(
                self._console, num_steps=self._job.config.train.steps,
                on_gpu=self._job.device == "cuda", scales_loss=trainer.scaler is not None,
                has_peak=self._job.rates.peak_flops is not None,
                averages=self._job.config.optim.ema_decay > 0,
            ),
        ]  # fmt: skip
        self._before, began = trainer.steps_done, time.perf_counter()
        try:
            for sink in self._further_sinks():
                sinks.append(sink)
            yield sinks
        finally:
            for sink in sinks:
                sink.close()
        self._seconds = time.perf_counter() - began

    def _further_sinks(self) -> Iterator[MetricsSink]:
        config, folder, first = self._job.config, self._folder, self._before or 0
        if config.metrics.sinks == AUTO and TensorBoard.installed():
            yield TensorBoard(folder, first_step=first)
        if config.metrics.names:
            from axonn_ext.train.sinks import open_sinks

            yield from open_sinks(config, folder, first_step=first, say=self._tell)

    def ended(self, trainer: Trainer, saved: Path | None) -> None:
        done = trainer.steps_done
        if self._before is None:
            return
        if not trainer.is_done:
            self._tell(
                f"ended after step {done:,}, which is saved. To go on, run the same command with "
                f"--resume auto --out {self._folder}"
            )
            return
        tokens = (done - self._before) * self._job.config.tokens_per_step
        self._summarise(tokens / self._seconds, _notes(trainer))
        if saved is not None:
            self._tell(_of_saved(saved))
        elif not self._job.config.checkpoint.interval:
            self._tell("no weights were saved: checkpoint.interval is 0")

    def _summarise(self, speed: float, notes: Sequence[str]) -> None:
        model, folder = self._job.model, self._folder
        run = read_metrics(folder)
        first, last = run.steps[0].loss, run.steps[-1].loss
        change = f" ({1 - last / first:.0%} lower)" if first else ""
        lines = [
            f"loss {first:.4f} -> {last:.4f}{change} in {duration(self._seconds)}, "
            f"{speed:,.0f} tokens/s",
            *notes,
        ]
        profiles = (PROFILE_FILE, MEMORY_FILE) if self._job.device == "cuda" else (PROFILE_FILE,)
        files = [METRICS_FILE, *(profiles if self.profile else ())]
        if importlib.util.find_spec("matplotlib"):
            size = f"{model.num_parameters() / 1e6:.2f} M parameters"
            title, grid = f"Training loss: {model.family}, {size}", describe_grid(self._job)
            with writing("--out", folder / LOSS_PICTURE):
                plot_loss(run, folder / LOSS_PICTURE, title=title, subtitle=grid)
            files.append(LOSS_PICTURE)
        else:
            lines.append(f"no {LOSS_PICTURE}: that needs matplotlib (pip install matplotlib)")
        lines.append("written: " + ", ".join(str(folder / name) for name in files))
        self._console.print()
        for line in lines:
            self._tell(line)


def _of_saved(folder: Path) -> str:
    """Returns a line that says how to use the folder of a fine-tuned model."""
    if folder.name == ADAPTER:
        return f"adapter: {folder}, in PEFT's format; axonn-ext generate takes it with --adapter"
    return f"model: {folder}, which transformers loads, as does axonn-ext generate --model"


def _note_of_average(config: Config) -> str:
    """Returns a line about an average that the run is too short for; "" if it is long enough."""
    decay, steps = config.optim.ema_decay, config.train.steps
    initial = decay**steps if decay else 0.0
    if initial < _MOST_INITIAL:
        return ""
    return (
        f"optim.ema_decay {decay:g}: after {steps:,} steps, the initial weights are still "
        f"{initial:.0%} of the average, which is evaluated; lower it for so short a run"
    )


def _notes(trainer: Trainer) -> list[str]:
    skipped, scaler = trainer.num_skipped, trainer.scaler
    overflows = []
    if scaler is not None:
        overflows = [
            f"steps whose gradients overflowed fp16: {scaler.num_overflows}; the loss scale is "
            f"{scaler.loss_scale:g} now"
        ]
    return [
        *([trainer.why_done] if trainer.stopped_early else []),
        *overflows,
        *([f"skipped steps, whose loss or gradient was not finite: {skipped}"] if skipped else []),
        *trainer.exposure.summary(),
    ]
