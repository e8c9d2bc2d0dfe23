"""Shows a run on a terminal, or as plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from axonn_ext.data import ByteVocabulary, Corpus, Examples, StoredVocabulary
from axonn_ext.data.corpus import DOCUMENTS, OpenSource
from axonn_ext.spec.grid import GridShape, divisors
from axonn_ext.terminal.console import say
from axonn_ext.train.job import Job
from axonn_ext.train.metrics import EvaluationMetrics, StepMetrics

if TYPE_CHECKING:
    from axonn_ext.data.stream_batches import Stream

NUM_LINES = 20  # number of lines printed for a run; in between, a live terminal shows a bar
_COLUMNS = (
    "step", "loss", "grad norm", "lr", "tokens/s", "TFLOP/s", "memory", "time left", "at"
)  # fmt: skip
_ROW = "{:>7}  {:>8}  {:>9}  {:>8}  {:>9}  {:>8}  {:>8}  {:>9}  {:>8}"
_GPU_COLUMNS, _GPU_ROW = ("of GPU",), "  {:>6}"
_PEAK_COLUMNS = ("hardware", "% of peak", "all attn.")
_PEAK_ROW = "  {:>8}  {:>9}  {:>9}"
_SCALE_COLUMNS, _SCALE_ROW = ("loss scale", "skipped"), "  {:>10}  {:>7}"


class Terminal:
    """Prints a line every few steps and at every evaluation, and a bar on a live terminal.

    averages: evaluations are those of an average of the weights.
    on_gpu: also show the share of the GPU's memory. scales_loss: also show the loss scale and the
    number of skipped steps. has_peak: also show TFLOP/s with recomputation, and % of the machine's
    peak without and with the masked half of attention.
    """

    def __init__(
        self, console: Console, *, num_steps: int, on_gpu: bool = False, scales_loss: bool = False,
        has_peak: bool = False, averages: bool = False,
    ) -> None:  # fmt: skip
        self._console, self._scales_loss, self._has_peak = console, scales_loss, has_peak
        self._num_steps, self._on_gpu = num_steps, on_gpu
        self._of = " (average of the weights)" if averages else ""
        self._interval = max(1, num_steps // NUM_LINES)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.completed:>7.0f}"), BarColumn(),
                TextColumn("{task.percentage:>3.0f} %  loss {task.fields[loss]}  "
                           "{task.fields[speed]} tokens/s  {task.fields[left]} left"),
                console=console, transient=True, refresh_per_second=4,
            )  # fmt: skip
            self._task = self._progress.add_task(
                "train", total=num_steps, loss="-", speed="-", left="-"
            )
            self._progress.start()
        titles = _GPU_ROW.format(*_GPU_COLUMNS) if on_gpu else ""
        titles += _PEAK_ROW.format(*_PEAK_COLUMNS) if has_peak else ""
        titles += _SCALE_ROW.format(*_SCALE_COLUMNS) if scales_loss else ""
        self._print(_ROW.format(*_COLUMNS) + titles, "bold")

    def step(self, metrics: StepMetrics) -> None:
        """Shows one step."""
        if self._progress is not None:
            self._progress.update(
                self._task, completed=metrics.step, loss=f"{metrics.loss:.4f}",
                speed=f"{metrics.tokens_per_s:,.0f}", left=duration(metrics.eta_s),
            )  # fmt: skip
        if metrics.step == 1 or metrics.step % self._interval == 0:
            norm = "overflow" if metrics.grad_norm is None else f"{metrics.grad_norm:.3f}"
            row = _ROW.format(
                metrics.step, f"{metrics.loss:.4f}", norm, f"{metrics.lr:.2e}",
                f"{metrics.tokens_per_s:,.0f}", f"{metrics.tflops:.3f}",
                f"{metrics.memory_bytes / 2**20:,.0f} MB", duration(metrics.eta_s),
                time.strftime("%H:%M:%S"),
            )  # fmt: skip
            if self._on_gpu:
                row += _GPU_ROW.format(f"{100 * (metrics.memory_fraction or 0.0):.0f} %")
            if self._has_peak:
                row += _peak_cells(metrics)
            if self._scales_loss:
                row += _SCALE_ROW.format(f"{metrics.loss_scale:,.10g}", metrics.skipped_steps)
            self._print(row)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """Shows one evaluation."""
        line = f"{metrics.step:>7}  {metrics.eval_loss:>8.4f}  on the held-out text{self._of}"
        self._print(line, "cyan")
        for sample in metrics.samples:
            self._print(f"{'':>7}  {_one_line(sample.prompt)} -> {_one_line(sample.text)}")

    def close(self) -> None:
        """Removes the bar; the lines stay."""
        if self._progress is not None:
            self._progress.stop()

    def _print(self, line: str, style: str = "") -> None:
        say(self._console, line, style)


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def _peak_cells(metrics: StepMetrics) -> str:
    assert metrics.hardware_tflops is not None
    assert metrics.peak_fraction is not None and metrics.whole_peak_fraction is not None
    fractions = (metrics.peak_fraction, metrics.whole_peak_fraction)
    shares = (f"{100 * fraction:.1f} %" for fraction in fractions)
    return _PEAK_ROW.format(f"{metrics.hardware_tflops:.3f}", *shares)


def print_header(
    console: Console, job: Job, corpus: Corpus | Examples | Stream, *, threads: int, folder: str,
    ranks_of_host: int,
) -> None:  # fmt: skip
    """Prints a short description of the run."""
    config, model = job.config, job.model
    parts = config.train.micro_batches
    lines = {
        "model": f"{config.model.pretrained or model.family}, "
        f"{model.num_parameters() / 1e6:.2f} M parameters: "
        f"{model.num_layers} layers, {model.hidden_size} features, {model.num_heads} heads",
        "grid": describe_grid(job) + f", {threads} {'thread' if threads == 1 else 'threads'} each",
        "hosts": describe_hosts(config.grid, ranks_of_host),
        "text": _describe_corpus(job, corpus) + _describe_goldfish(job),
        "steps": f"{config.train.steps:,} of {config.train.batch_size} x "
        f"{config.model.sequence_length} = {config.tokens_per_step:,} tokens"
        + (f", in {parts} micro-batches" if parts > 1 else ""),
        "run": folder,
    }
    for name, value in lines.items():
        if value:
            say(console, f"{name:>7}  {value}")
        if name == "text" and isinstance(corpus, Examples):
            for note in _notes(job, corpus):
                say(console, f"{'':>7}  {note}")
    console.print()


def _describe_corpus(job: Job, corpus: Corpus | Examples | Stream) -> str:
    known = job.text.vocabulary
    vocabulary = f"{known.num_tokens:,} tokens of {job.config.vocabulary}"
    if isinstance(known, StoredVocabulary):
        vocabulary = f"{known.num_tokens:,} tokens of {known.name}"
    elif isinstance(known, ByteVocabulary):
        vocabulary = "bytes"
    if isinstance(corpus, Examples):
        cut = f" ({corpus.num_cut:,} cut to a sequence)" if corpus.num_cut else ""
        return (
            f"{job.config.data.text}: {len(corpus.train):,} examples{cut}, "
            f"{len(corpus.held_out):,} held out, {vocabulary}, packed"
        )
    if not isinstance(corpus, Corpus):
        return f"{job.config.data.text}: a stream, split {job.config.stream.split}, {vocabulary}"
    sources = "; ".join(_describe_source(each) for each in corpus.sources)
    order = ", shuffled documents" if corpus.order == DOCUMENTS else ""
    return f"{sources}, {vocabulary}{order}"


def _notes(job: Job, examples: Examples) -> Iterator[str]:
    """Yields lines about skipped examples and an evaluation that cannot take place."""
    usable = len(examples.train) + len(examples.held_out)
    if examples.skipped:
        count = sum(each.count for each in examples.skipped)
        reasons = (f"{e.count:,} with {e.reason} (first: {e.first})" for e in examples.skipped)
        yield f"{count:,} {'example' if count == 1 else 'examples'} skipped: {', '.join(reasons)}"
    if job.config.train.eval_interval and not examples.held_out:
        share = job.config.data.held_out
        yield f"no evaluation: data.held_out is {share:g}, which is none of {usable:,} examples"


def _describe_goldfish(job: Job) -> str:
    goldfish = job.config.goldfish_options()
    if goldfish is None:
        return ""
    where = "before it" if goldfish.window == "before" else "that end with it"
    return f"; one target in {goldfish.k} is dropped, by {goldfish.h} tokens {where}"


def _describe_source(opened: OpenSource) -> str:
    name, count = opened.source.name or "Python's own sources", opened.tokens.num_documents
    if opened.source.is_text:
        files = "file" if count == 1 else "files"
        return f"{name}: {opened.num_bytes / 1e6:.1f} MB, {count:,} {files}"
    documents = "document" if count == 1 else "documents"
    return f"{name}: {opened.tokens.num_tokens:,} tokens, {count:,} {documents}"


def describe_grid(job: Job) -> str:
    """Describes the grid, the processes and the dtype, for headers and titles."""
    config, dtype = job.config, job.config.train.dtype
    if config.model.implementation == "plain":
        return f"plain PyTorch, 1 process, {dtype}"
    count = config.grid.size
    processes = "1 process" if count == 1 else f"{count} processes"
    return f"{config.grid}: {processes}, {config.parallel.layout}, {dtype}"


def describe_hosts(shape: GridShape, ranks_of_host: int) -> str:
    """Returns which axes stay inside a host, with a warning if x does not; "" on one host."""
    if shape.size <= ranks_of_host:
        return ""
    inside = shape.inside(ranks_of_host)
    across = [axis for axis, size in shape.as_dict().items() if size > 1 and axis not in inside]
    text = (
        f"{shape.size // ranks_of_host} with {ranks_of_host} "
        f"{'rank' if ranks_of_host == 1 else 'ranks'} each; inside a host: "
        f"{', '.join(inside) or 'no axis'}; across hosts: {', '.join(across)}"
    )
    if "x" in across and ranks_of_host > 1:
        sizes = ", ".join(map(str, divisors(ranks_of_host)))
        text += (
            f"\nwarning: x={shape.x} communicates most and leaves the host; it would stay inside "
            f"with a size of {sizes}"
        )
    return text


def duration(seconds: float) -> str:
    """Returns a time such as 42s, 3m 05s or 2h 07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
