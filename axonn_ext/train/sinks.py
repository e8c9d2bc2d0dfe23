"""Where the metrics of a run go in addition to its folder. Only rank 0 loads this.

A sink of your own is named MODULE:NAME in metrics.sinks. NAME is called with a `SinkRun` and
returns a `MetricsSink`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from axonn_ext.spec.files.files import FileError, parse_json, read_text
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config import Config
from axonn_ext.train.differences import as_json
from axonn_ext.train.metrics import EvaluationMetrics, MetricsSink, Sample, StepMetrics, TensorBoard

_PARAMETERS_AT_A_TIME = 100  # MLflow's limit


@dataclasses.dataclass(frozen=True)
class SinkRun:
    """The run whose metrics a sink receives.

    folder      the run's folder, whose name is the run's
    first_step  the number of steps before a resume: a sink may already have later ones
    project     metrics.project
    config      the values of all keys, by table
    """

    folder: Path
    first_step: int
    project: str
    config: Mapping[str, Mapping[str, Any]]


Opener = Callable[[SinkRun], MetricsSink]


def check_sinks(config: Config) -> None:
    """Raises UserError if a sink of the run cannot be loaded here."""
    for name in config.metrics.names:
        _opener(name)


def open_sinks(
    config: Config, folder: Path, *, first_step: int, say: Callable[[str], None]
) -> Iterator[MetricsSink]:
    """Opens the sinks of a run, one after the other. Raises UserError if one cannot be opened.

    say: shows a line to the user; a sink that fails later is named once and left out.
    """
    run = SinkRun(folder, first_step, config.metrics.project, as_json(config))
    for name in config.metrics.names:
        try:
            sink = _opener(name)(run)
        except UserError:
            raise
        except Exception as error:  # whatever a service or a user's code raises
            raise UserError(f"metrics.sinks: {name} cannot be opened: {error}") from error
        yield _Kept(name, sink, say)


def _opener(name: str) -> Opener:
    """Returns what opens a sink. Raises UserError if its package or module is missing."""
    if name in _OPENERS:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"metrics.sinks: expected {name} to be installed, got no such package: "
                f"pip install 'axonn-ext[{name}]'"
            )
        return _OPENERS[name]
    module, _, attribute = name.partition(":")
    try:
        opener = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a user's code raises
        raise UserError(f"metrics.sinks: {name} cannot be loaded: {error}") from None
    if not callable(opener):
        raise UserError(f"metrics.sinks: expected {name} to be a class or function, got {opener!r}")
    return opener  # type: ignore[no-any-return]


class _Kept:
    """Passes metrics on until the sink fails; the run goes on without it."""

    def __init__(self, name: str, sink: MetricsSink, say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        self._sink: MetricsSink | None = sink

    def step(self, metrics: StepMetrics) -> None:
        self._try(lambda sink: sink.step(metrics))

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        self._try(lambda sink: sink.evaluation(metrics))

    def close(self) -> None:
        self._try(lambda sink: sink.close())

    def _try(self, act: Callable[[MetricsSink], None]) -> None:
        if self._sink is None:
            return
        try:
            act(self._sink)
        except Exception as error:  # such as a server that is down
            self._sink = None
            self._say(f"metrics.sinks: {self._name} failed, the run goes on without it: {error}")


class _Sent:
    """The id of a service's run, and its last metrics, in a file of the run's folder.

    A service keeps what it got. A resumed run takes some steps again and must not send them twice.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        self._path, self.id, self._last = path, "", -1
        if first_step and path.is_file():
            try:
                saved = parse_json(read_text(path), str(path))
                self.id, self._last = str(saved["id"]), int(saved["last"])
            except (FileError, KeyError, TypeError, ValueError):
                raise UserError(f"metrics.sinks: {path} is damaged; remove it") from None

    def is_new(self, step: int, *, is_evaluation: bool) -> bool:
        """Whether the metrics have not been sent; the evaluation follows the step."""
        return 2 * step + is_evaluation > self._last

    def sent(self, step: int, *, is_evaluation: bool) -> None:
        self._last = 2 * step + is_evaluation
        self.write()

    def write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({"id": self.id, "last": self._last}))
        partial.replace(self._path)


class _Service:
    """Base of services: sends each step once, by `_send`."""

    def __init__(self, run: SinkRun, name: str) -> None:
        self._sent = _Sent(run.folder / f"{name}.json", first_step=run.first_step)

    def step(self, metrics: StepMetrics) -> None:
        self._once(dataclasses.asdict(metrics), is_evaluation=False)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        self._once(dict(metrics.numbers), is_evaluation=True, samples=metrics.samples)

    def _once(
        self, values: dict[str, Any], *, is_evaluation: bool, samples: Sequence[Sample] = ()
    ) -> None:  # fmt: skip
        step = values.pop("step")
        if self._sent.is_new(step, is_evaluation=is_evaluation):
            self._send(step, {key: value for key, value in values.items() if value is not None})
            if samples:
                self._send_samples(step, samples)
            self._sent.sent(step, is_evaluation=is_evaluation)

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def _send_samples(self, step: int, samples: Sequence[Sample]) -> None:
        raise NotImplementedError


class WeightsAndBiases(_Service):
    """Sends metrics to Weights & Biases, as its own variables such as WANDB_MODE say."""

    def __init__(self, run: SinkRun) -> None:
        super().__init__(run, "wandb")
        import wandb

        self._run = wandb.init(
            project=run.project, name=run.folder.name, dir=str(run.folder), config=dict(run.config),
            id=self._sent.id or None, resume="allow",
        )  # fmt: skip
        self._sent.id = str(self._run.id)
        self._sent.write()

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def _send_samples(self, step: int, samples: Sequence[Sample]) -> None:
        import wandb

        rows = [[sample.prompt, sample.text] for sample in samples]
        table = wandb.Table(columns=["prompt", "text"], data=rows)
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow(_Service):
    """Sends metrics to MLflow, to the server or store of MLFLOW_TRACKING_URI."""

    def __init__(self, run: SinkRun) -> None:
        super().__init__(run, "mlflow")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        if self._sent.id:
            self._client.update_run(self._sent.id, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(run.project)
        experiment = known.experiment_id if known else self._client.create_experiment(run.project)
        self._sent.id = self._client.create_run(experiment, run_name=run.folder.name).info.run_id
        self._sent.write()
        self._send_parameters(run.config)

    def _send_parameters(self, config: Mapping[str, Mapping[str, Any]]) -> None:
        from mlflow.entities import Param

        every = [
            Param(f"{table}.{key}", str(value))
            for table, values in config.items()
            for key, value in values.items()
        ]
        for first in range(0, len(every), _PARAMETERS_AT_A_TIME):
            some = every[first : first + _PARAMETERS_AT_A_TIME]
            self._client.log_batch(self._sent.id, params=some)

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [Metric(key, value, now, step) for key, value in values.items()]
        self._client.log_batch(self._sent.id, metrics=metrics)

    def _send_samples(self, step: int, samples: Sequence[Sample]) -> None:
        text = json.dumps([dataclasses.asdict(sample) for sample in samples], indent=1)
        self._client.log_text(self._sent.id, text, f"samples/step-{step:08}.json")

    def close(self) -> None:
        self._client.set_terminated(self._sent.id)


def _tensorboard(run: SinkRun) -> MetricsSink:
    return TensorBoard(run.folder, first_step=run.first_step)


_OPENERS: Mapping[str, Opener] = {
    "tensorboard": _tensorboard, "wandb": WeightsAndBiases, "mlflow": MLflow,
}  # fmt: skip
