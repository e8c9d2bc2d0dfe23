"""Where the metrics of a run go: TensorBoard, Weights & Biases, MLflow and sinks of the user's own.

Tests of services run against their real libraries, without a network, where these are installed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import struct
import sys
from pathlib import Path

import pytest

from axonn_ext.terminal.errors import UserError
from axonn_ext.train import sinks
from axonn_ext.train.config_file import Override, load_config
from axonn_ext.train.metrics import EvaluationMetrics, RunMetrics, StepMetrics
from trained_here import train_here

OPTIONS = {
    "train.steps": 4, "train.eval_interval": 2, "checkpoint.interval": 2,
    "checkpoint.keep_last": 9, "parallel.algorithm": "sequential",
}  # fmt: skip
STEPS = [1, 2, 3, 4]
OWN = """
class Sink:
    def __init__(self, run):
        self.run, self.file = run, open(run.folder / "own.txt", "a")
        print("opened", run.first_step, run.project, run.config["train"]["steps"], file=self.file)

    def step(self, metrics):
        if self.run.project == "fails":
            raise OSError("the server is down")
        print("step", metrics.step, file=self.file)

    def evaluation(self, metrics):
        print("evaluation", metrics.step, len(metrics.samples), file=self.file)

    def close(self):
        print("closed", file=self.file)
        self.file.close()

number = 3

def refuses(run):
    raise RuntimeError("no account")
"""


def train_and_resume(folder: Path, name: str, project: str = "tests") -> RunMetrics:
    """Trains 4 steps, forgets the last checkpoint, and takes steps 3 and 4 again."""
    options = OPTIONS | {"metrics.sinks": name, "metrics.project": project}
    (prompts := folder.parent / "prompts.txt").write_text("def f(x):\nimport \n")
    options |= {"train.samples": prompts, "train.sample_tokens": 5}
    train_here(folder, **options)
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    return train_here(folder, **options, checkpoint__resume="auto")


def needs(*packages: str) -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")


@pytest.mark.long
def test_mlflow_has_each_step_once(tmp_path, monkeypatch) -> None:
    needs("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    run = train_and_resume(tmp_path / "run", "mlflow")
    import mlflow
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("tests")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "run"
    assert found.data.params["train.steps"] == "4"
    history = client.get_metric_history(found.info.run_id, "loss")
    assert {each.step: each.value for each in history} == {m.step: m.loss for m in run.steps}
    assert [each.step for each in history] == STEPS
    history = client.get_metric_history(found.info.run_id, "eval_loss")
    assert [(each.step, each.value) for each in history] == [
        (m.step, m.eval_loss) for m in run.evaluations
    ]
    files = [each.path for each in client.list_artifacts(found.info.run_id, "samples")]
    assert files == [f"samples/step-{m.step:08}.json" for m in run.evaluations]
    last = json.loads(mlflow.artifacts.load_text(f"runs:/{found.info.run_id}/{files[-1]}"))
    assert last == [dataclasses.asdict(sample) for sample in run.evaluations[-1].samples]


@pytest.mark.long
def test_wandb_has_each_step_once(tmp_path, monkeypatch) -> None:
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = train_and_resume(tmp_path / "run", "wandb")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1, "one run, in two parts"
    rows = [row for file in files for row in history(file)]
    assert [row["_step"] for row in rows] == [0, *STEPS]
    assert [row["loss"] for row in rows[1:]] == [m.loss for m in run.steps]
    losses = {row["_step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    assert losses == {m.step: m.eval_loss for m in run.evaluations}
    tables = {
        row["_step"]: table_of(tmp_path / "run", row) for row in rows if "samples.path" in row
    }
    assert tables == {
        m.step: [[sample.prompt, sample.text] for sample in m.samples] for m in run.evaluations
    }


def table_of(folder: Path, row: dict[str, str]) -> list[list[str]]:
    """The rows of the table that a row of the history names."""
    [path] = (folder / "wandb").glob(f"offline-run-*/files/{row['samples.path']}")
    return json.loads(path.read_text())["data"]


def history(file: Path) -> list[dict[str, float]]:
    """The rows in the file of an offline run.

    The file is a log as of LevelDB: after 7 bytes, blocks of 32 KiB with records. A record has a
    checksum (4 bytes), a length (2) and a type (1: all, 2: first, 3: middle, 4: last part).
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, data, rows = file.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        data += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record, data = Record.FromString(data), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                names = [each.key or ".".join(each.nested_key) for each in items]
                values = [json.loads(each.value_json) for each in items]
                rows.append(dict(zip(names, values, strict=True)))
    return rows


@pytest.mark.long
@pytest.mark.parametrize("name", ["auto", "tensorboard"])
def test_tensorboard_has_each_step_once(tmp_path, name: str) -> None:
    needs("tensorboard")
    run = train_and_resume(tmp_path / "run", name)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == STEPS
    assert [event.step for event in events.Scalars("eval_loss")] == [0, 2, 4]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(
        [m.loss for m in run.steps]
    )
    texts = events.Tensors("samples/1/text_summary")
    # A resume makes TensorBoard forget scalars, but not texts, of the steps that are taken again.
    assert [event.step for event in texts] == [0, 2, 4, 4]
    assert b"    import " in texts[0].tensor_proto.string_val[0]


def test_a_sink_of_ones_own(tmp_path, own, capsys) -> None:
    train_and_resume(tmp_path / "run", f"{own}:Sink")
    told = (tmp_path / "run" / "own.txt").read_text().splitlines()
    first = ["opened 0 tests 4", "evaluation 0 2", "step 1", "step 2", "evaluation 2 2"]
    again = ["step 3", "step 4", "evaluation 4 2", "closed"]
    assert told == [*first, *again, "opened 2 tests 4", *again]


def test_a_sink_that_fails_does_not_end_the_run(tmp_path, own, capsys) -> None:
    options = OPTIONS | {"metrics.sinks": f"{own}:Sink", "metrics.project": "fails"}
    assert [m.step for m in train_here(tmp_path / "run", **options).steps] == STEPS
    message = f"metrics.sinks: {own}:Sink failed, the run goes on without it: the server is down"
    assert capsys.readouterr().out.count(message) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandb", r"expected wandb to be installed, .*: pip install 'axonn-ext\[wandb\]'"),
        ("mlflow", r"expected mlflow to be installed, .*: pip install 'axonn-ext\[mlflow\]'"),
        ("tensorboard", r"expected tensorboard .*: pip install 'axonn-ext\[tensorboard\]'"),
        ("no_such_module:Sink", "no_such_module:Sink cannot be loaded: No module named"),
        ("OWN:Nothing", "OWN:Nothing cannot be loaded: module .* has no attribute 'Nothing'"),
        ("OWN:number", "expected OWN:number to be a class or function, got 3"),
        ("OWN:refuses", "OWN:refuses cannot be opened: no account"),
    ],
)
def test_what_cannot_be_opened(tmp_path, own, monkeypatch, name: str, message: str) -> None:
    find = importlib.util.find_spec
    missing = lambda package: None if package == name else find(package)  # noqa: E731
    monkeypatch.setattr(sinks.importlib.util, "find_spec", missing)
    with pytest.raises(UserError, match=f"metrics.sinks: {message.replace('OWN', own)}"):
        train_here(tmp_path / "run", **{"metrics.sinks": name.replace("OWN", own)})


def test_a_sink_that_cannot_be_opened_closes_those_before_it(tmp_path, own) -> None:
    with pytest.raises(UserError, match="no account"):
        train_here(tmp_path / "run", **{"metrics.sinks": f"{own}:Sink,{own}:refuses"})
    assert (tmp_path / "run" / "own.txt").read_text().splitlines()[-1] == "closed"


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("metrics.sinks", "neptune",
         "metrics.sinks: expected auto, or names of tensorboard, wandb, mlflow or MODULE:NAME, "
         'separated by commas, got "neptune"'),
        ("metrics.sinks", "wandb,", 'MODULE:NAME, separated by commas, got "wandb,"'),
        ("metrics.project", "", 'metrics.project: expected a name, got ""'),
    ],
)  # fmt: skip
def test_bad_keys(key: str, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, overrides=(Override(key, text),))
    assert message in str(caught.value)


class Recorder(sinks._Service):
    """A service that records what it is sent."""

    def __init__(self, run: sinks.SinkRun) -> None:
        super().__init__(run, "recorder")
        self._sent.id, self.seen = "an id", []

    def _send(self, step, values) -> None:
        self.seen.append((step, *values))


def test_a_service_gets_nothing_twice(tmp_path) -> None:
    """Also if a resumed run ends earlier than the one before, and goes on once more."""

    def told(first_step: int, last: int) -> list[tuple]:
        recorder = Recorder(sinks.SinkRun(tmp_path, first_step, "tests", {}))
        for step in range(first_step + 1, last + 1):
            recorder.step(StepMetrics(step, 1.0, None, 1.0, 1, 1.0, 1.0, 1, 1.0))
            if step == 4:
                recorder.evaluation(EvaluationMetrics(step, 1, 1.0))
        return [(step, "eval_loss" in names) for step, *names in recorder.seen]

    assert told(0, 4) == [(1, False), (2, False), (3, False), (4, False), (4, True)]
    assert told(2, 3) == []
    assert told(2, 6) == [(5, False), (6, False)]
    assert told(0, 1) == [(1, False)], "a new run in the folder"
    (tmp_path / "recorder.json").write_text("{")
    with pytest.raises(UserError, match=r"recorder\.json is damaged; remove it"):
        told(1, 2)


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    """The name of a module with a sink."""
    name = f"own_sink_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)
