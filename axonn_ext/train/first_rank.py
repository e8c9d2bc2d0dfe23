"""What rank 0 shows of a run, and the files that it writes. Other ranks do not load this."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from axonn_ext.terminal.console import Console, say
from axonn_ext.terminal.files import writing
from axonn_ext.train.job import Job
from axonn_ext.train.metrics import (
    METRICS_FILE,
    MetricsFile,
    MetricsSink,
    TensorBoard,
    read_metrics,
)
from axonn_ext.train.plot import plot_loss
from axonn_ext.train.run_folder import ADAPTER, LOSS_PICTURE, PROFILE_FILE, create_folder
from axonn_ext.train.terminal import Terminal, describe_grid, duration, print_header
from axonn_ext.train.trainer import Trainer
from axonn_ext.train.worker import Run


def train_and_show(run: Run, *, threads: int, profile: bool, notes: Sequence[str]) -> None:
    """Trains on rank 0, which also shows the progress and writes the files and the picture.

    notes: lines that are shown above all else, but for empty ones
    """
    console, job, folder = Console(), run.job, run.folder
    tell = partial(say, console)
    sinks: list[MetricsSink] = []
    continues = run.resumed is not None and folder.resolve() in run.resumed.parents
    trainer = run.make_trainer(
        sinks=sinks, profile=folder / PROFILE_FILE if profile else None, say=tell
    )
    for note in filter(None, notes):  # not before: the model's files may not fit
        tell(note)
    print_header(
        console, job, run.corpus, threads=threads, folder=str(folder),
        ranks_of_host=run.ranks_of_host,
    )  # fmt: skip
    create_folder(folder, job.config, resumes=continues)  # now that nothing is missing
    if run.resumed is not None:
        _resume_and_show(trainer, run.resumed, tell)
    if trainer.is_done:
        tell(f"nothing is left to do: train.steps is {job.config.train.steps:,}")
        run.save(trainer)  # the run that took the last step may have ended before this
        run.watching.close()
        return
    if run.needs_warm_up:
        _warm_up_and_show(trainer, console)
    before = trainer.steps_done
    seconds = _train_with_sinks(run, trainer, console, sinks)
    saved = run.save(trainer) if trainer.is_done else None
    run.watching.close()
    if not trainer.is_done:
        tell(f"ended after step {trainer.steps_done:,}, which is saved: --resume auto goes on")
        return
    tokens = (trainer.steps_done - before) * job.config.tokens_per_step
    _summarise(
        job, console, folder=folder, tokens=tokens, seconds=seconds, notes=_notes(trainer),
        profile=profile,
    )  # fmt: skip
    if saved is not None:
        tell(_of_saved(saved))


def _of_saved(folder: Path) -> str:
    """Says what the folder of a fine-tuned model is good for."""
    if folder.name == ADAPTER:
        return f"adapter: {folder}, in PEFT's format; axonn-ext generate takes it with --adapter"
    return f"model: {folder}, which transformers loads, as does axonn-ext generate --model"


def _train_with_sinks(
    run: Run, trainer: Trainer, console: Console, sinks: list[MetricsSink]
) -> float:
    """Runs the steps, and returns the seconds that they took."""
    sinks += [
        MetricsFile(run.folder, first_step=trainer.steps_done),
        Terminal(
            console,
            num_steps=run.job.config.train.steps,
            scales_loss=trainer.scaler is not None,
            has_peak=run.job.rates.peak_flops is not None,
        ),
    ]
    if TensorBoard.installed():
        sinks.append(TensorBoard(run.folder))
    began = time.perf_counter()
    try:
        trainer.run()
    finally:
        for sink in sinks:
            sink.close()
    return time.perf_counter() - began


def _resume_and_show(trainer: Trainer, path: Path, tell: Callable[[str], None]) -> None:
    resumed = trainer.resume(path)
    tell(f"resumed  step {resumed.step:,} of a run on {resumed.grid}, from {path}")
    for note in resumed.notes:
        tell(f"         {note}")
    tell("")


def _warm_up_and_show(trainer: Trainer, console: Console) -> None:
    began = time.perf_counter()
    num_measured = trainer.warm_up()
    if num_measured:
        seconds = time.perf_counter() - began
        text = f"warm-up: measured the algorithms of {num_measured} ops in {seconds:.1f} s"
        say(console, text)


def _notes(trainer: Trainer) -> list[str]:
    skipped, scaler = trainer.num_skipped, trainer.scaler
    overflows = []
    if scaler is not None:
        overflows = [
            f"steps whose gradients overflowed fp16: {scaler.num_overflows}; the loss scale is "
            f"{scaler.loss_scale:g} now"
        ]
    return [
        *overflows,
        *([f"skipped steps, whose loss or gradient was not finite: {skipped}"] if skipped else []),
        *trainer.exposure.summary(),
    ]


def _summarise(
    job: Job,
    console: Console,
    *,
    folder: Path,
    tokens: int,
    seconds: float,
    notes: list[str],
    profile: bool,
) -> None:
    run = read_metrics(folder)
    first, last = run.steps[0].loss, run.steps[-1].loss
    speed = tokens / seconds
    change = f" ({1 - last / first:.0%} lower)" if first else ""
    lines = [
        f"loss {first:.4f} -> {last:.4f}{change} in {duration(seconds)}, {speed:,.0f} tokens/s",
        *notes,
    ]
    files = [METRICS_FILE, *([PROFILE_FILE] if profile else [])]
    if importlib.util.find_spec("matplotlib"):
        size = f"{job.model.num_parameters() / 1e6:.2f} M parameters"
        title = f"Training loss: {job.model.family}, {size}"
        with writing("--out", folder / LOSS_PICTURE):
            plot_loss(run, folder / LOSS_PICTURE, title=title, subtitle=describe_grid(job))
        files.append(LOSS_PICTURE)
    else:
        lines.append(f"no {LOSS_PICTURE}: that needs matplotlib (pip install matplotlib)")
    lines.append("written: " + ", ".join(str(folder / name) for name in files))
    console.print()
    for line in lines:
        say(console, line)
