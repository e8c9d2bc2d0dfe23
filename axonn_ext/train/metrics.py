"""The metrics of a run, and the file that stores them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from axonn_ext.spec.files.errors import clipped
from axonn_ext.spec.files.files import FileError, open_new, parse_json, read_text
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.files import writing

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
MOST_BYTES = 4 << 30  # the largest metrics.jsonl that is read; enough for ten million steps
MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step.

    step           its number, from 1
    loss           the mean over the labels of the global batch, before the update
    grad_norm      the norm of all gradients before clipping; None if they overflowed fp16, so that
                   the step was skipped
    lr             the learning rate
    tokens         the tokens of all steps up to this one
    tokens_per_s   the rate of the whole job
    tflops         10**12 model flops per second of the whole job (ModelConfig.flops_per_token)
    memory_bytes   the peak memory of rank 0 so far: on a GPU what torch allocated, on a CPU the
                   process's resident memory
    eta_s          the seconds that the rest of the run should take
    loss_scale     the factor of the loss before backward; 1 except for fp16
    skipped_steps  the steps up to this one whose gradients overflowed fp16
    dropped        the share of the labels that Goldfish loss left out of the global batch
    hardware_tflops, peak_fraction, whole_peak_fraction
                   see train.rates.Speed; the last two are None if train.machine is empty
    memory_fraction  memory_bytes over the memory of rank 0's GPU; None on a CPU
    """

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens: int
    tokens_per_s: float
    tflops: float
    memory_bytes: int
    eta_s: float
    loss_scale: float = 1.0
    skipped_steps: int = 0
    dropped: float = 0.0
    hardware_tflops: float | None = None
    peak_fraction: float | None = None
    whole_peak_fraction: float | None = None
    memory_fraction: float | None = None


@dataclass(frozen=True)
class Sample:
    """A prompt of train.samples, and the text that the model generated after it."""

    prompt: str
    text: str


@dataclass(frozen=True)
class EvaluationMetrics:
    """The loss on the held-out text, and the continued prompts.

    step       the number of steps before it
    tokens     the tokens of these steps
    eval_loss  the mean over the labels of the held-out text
    samples    with train.samples: objects with a prompt and the text that follows
    """

    step: int
    tokens: int
    eval_loss: float
    samples: tuple[Sample, ...] = ()

    @property
    def numbers(self) -> dict[str, float]:
        """All but the samples."""
        return {"step": self.step, "tokens": self.tokens, "eval_loss": self.eval_loss}


class MetricsSink(Protocol):
    """Receives the metrics of a run while it runs.

    `axonn_ext.train.sinks` opens those that metrics.sinks names.
    """

    def step(self, metrics: StepMetrics) -> None: ...

    def evaluation(self, metrics: EvaluationMetrics) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """Writes metrics.jsonl, one JSON object per line, each flushed immediately.

    first_step: number of steps before a run was resumed; lines of the existing file up to this step
    are kept.
    """

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        self._path = folder / METRICS_FILE
        with writing("--out", self._path):
            beside = self._path.with_name(f".{METRICS_FILE}.partial")
            with open_new(beside) as file:
                file.write("".join(_lines_up_to(self._path, first_step)).encode())
            beside.replace(self._path)  # a full disk does not cost the lines that were there
            self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def step(self, metrics: StepMetrics) -> None:
        self._write(dataclasses.asdict(metrics))

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        samples = [dataclasses.asdict(each) for each in metrics.samples]
        self._write({**metrics.numbers, **({"samples": samples} if samples else {})})

    def close(self) -> None:
        with writing("--out", self._path):
            self._file.close()

    def _write(self, values: dict[str, Any]) -> None:
        with writing("--out", self._path):
            self._file.write(json.dumps(values) + "\n")


def _lines_up_to(path: Path, step: int) -> list[str]:
    """Returns the complete lines of a metrics file that belong to the first `step` steps."""
    if not step or not path.is_file():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # the job ended while writing this line
    return kept


class TensorBoard:
    """Writes the same numbers as TensorBoard scalars.

    first_step: number of steps before a run was resumed; TensorBoard forgets later ones.
    """

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purged = first_step + 1 if first_step else None
        self._writer = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=purged)

    @staticmethod
    def installed() -> bool:
        return importlib.util.find_spec("tensorboard") is not None

    def step(self, metrics: StepMetrics) -> None:
        self._write(dataclasses.asdict(metrics))

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        self._write(dict(metrics.numbers))
        for number, sample in enumerate(metrics.samples):
            # TensorBoard shows Markdown, in which indented lines are kept as they are.
            text = "\n".join(f"    {line}" for line in f"{sample.prompt}{sample.text}".split("\n"))
            self._writer.add_text(f"samples/{number}", text, metrics.step)

    def close(self) -> None:
        self._writer.close()

    def _write(self, values: dict[str, Any]) -> None:
        step = values.pop("step")
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)


@dataclass
class RunMetrics:
    """The content of metrics.jsonl of one run."""

    steps: list[StepMetrics] = field(default_factory=list)
    evaluations: list[EvaluationMetrics] = field(default_factory=list)


def _samples(values: Any, place: str) -> tuple[Sample, ...]:
    try:
        samples = tuple(Sample(**each) for each in values)
    except TypeError:
        raise UserError(f"{place} is not a line of metrics: samples: expected objects") from None
    return samples


def _add_line(run: RunMetrics, values: Any, place: str) -> None:
    """Adds the values of one line. Raises UserError for a malformed line."""
    keys = values.keys() if isinstance(values, dict) else ()
    samples = _samples(values.pop("samples"), place) if "samples" in keys else ()
    kind = EvaluationMetrics if "eval_loss" in keys else StepMetrics
    fields = {f.name: f for f in dataclasses.fields(kind)}
    # Files of earlier versions may lack keys that have defaults.
    needed = {name for name, f in fields.items() if f.default is dataclasses.MISSING}
    if not isinstance(values, dict) or not needed <= values.keys() <= fields.keys():
        raise UserError(f"{place} is not a line of metrics: expected the keys {', '.join(fields)}")
    for name, value in values.items():
        wanted = int if fields[name].type == "int" else float
        if value is None and fields[name].type == "float | None":
            continue
        whole = type(value) is int and abs(value) <= MAX_INTEGER
        if not whole and not (wanted is float and type(value) is float):
            expected = "a whole number" if wanted is int else "a number"
            got = clipped(json.dumps(value))
            raise UserError(
                f"{place} is not a line of metrics: {name}: expected {expected}, got {got}"
            )
    if kind is EvaluationMetrics:
        run.evaluations.append(EvaluationMetrics(**values, samples=samples))
    else:
        run.steps.append(StepMetrics(**values))


def read_metrics(folder: Path) -> RunMetrics:
    """Reads the metrics of the run in `folder`.

    Raises: UserError if there are none or a line is malformed.
    """
    path = folder / METRICS_FILE
    run = RunMetrics()
    try:
        for number, line in enumerate(read_text(path, most_bytes=MOST_BYTES).split("\n"), start=1):
            if line.strip():
                _add_line(run, parse_json(line, f"{path}, line {number}"), f"{path}, line {number}")
    except FileError as error:
        raise UserError(f"expected a run in {folder}, but {error}") from None
    if not run.steps:
        raise UserError(f"expected the metrics of at least one step in {path}, got none")
    return run
