"""The files that `axonn-ext plan` writes: JSON, CSV, a Chrome trace, a configuration."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonn_ext.cli.plan.budget import Budget
from axonn_ext.cli.plan.cells import duration, gigabytes
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.job import Job, Options
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.search.fastest import Plan
from axonn_ext.planner.search.request import Request
from axonn_ext.planner.simulation.events import Timeline
from axonn_ext.planner.step.volumes import most_bytes_by_axis
from axonn_ext.planner.uncertainty import step_range
from axonn_ext.spec.files.files import is_file
from axonn_ext.spec.files.keys import keys_of
from axonn_ext.spec.grid import COMMUNICATING
from axonn_ext.spec.model import ModelConfig, ModelSizes
from axonn_ext.spec.parallel import ParallelConfig
from axonn_ext.spec.stages import Stages
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.files import write_text

if TYPE_CHECKING:
    from axonn_ext.train.config import Config

Json = dict[str, Any]


# --- JSON ----------------------------------------------------------------------------------------


def plan_as_json(result: Plan, budget: Budget) -> Json:
    """Returns the object that docs/interfaces.md describes."""
    return {
        **request_as_json(result.request, budget),
        "gpus": result.request.num_ranks,
        "global_batch": result.request.batch_size,
        "num_considered": result.num_considered,
        "num_fit": result.fits,
        "configs": [
            config_as_json(estimate, result.request.machine, budget) for estimate in result.configs
        ],
        "rejected": dict(result.rejected),
    }


def request_as_json(request: Request, budget: Budget) -> Json:
    """Returns the request, without the number of GPUs and the batch."""
    model = dataclasses.asdict(request.model) | {"num_parameters": request.model.num_parameters()}
    return {
        "model": {"name": request.model_name, **model},
        "machine": request.machine.name,
        "dtype": request.dtype,
        "memory_limit_bytes": request.memory_limit,
        "token_budget": budget.tokens,
    }


def config_as_json(estimate: Estimate, machine: Machine, budget: Budget) -> Json:
    """Returns one configuration and its prediction."""
    job, memory = estimate.job, estimate.memory
    return {
        "grid": job.grid.as_dict(),
        "batch_size": job.batch_size,
        **_options_as_json(job.options, pipe=job.grid.pipe),
        "step_time_s": estimate.step_time_s,
        "step_time_range_s": list(step_range(job, machine)[:2]),
        "compute_s": estimate.compute_s,
        "optimizer_s": estimate.optimizer_s,
        "exposed_s": {axis: estimate.exposed_s.get(axis, 0.0) for axis in COMMUNICATING},
        "peak_fraction": estimate.peak_fraction,
        "whole_peak_fraction": estimate.whole_peak_fraction,
        "tokens_per_s": estimate.tokens_per_s,
        "days": budget.days(estimate),
        "gpu_hours": budget.gpu_hours(estimate),
        "cost": budget.cost(estimate),
        "energy_mwh": budget.energy_mwh(estimate),
        "bytes_sent": dict.fromkeys(COMMUNICATING, 0) | most_bytes_by_axis(job),
        "memory_bytes": memory.total,
        "memory_items": memory._asdict(),
        "memory_share": estimate.memory_share,
        "binding": estimate.binding,
    }


def _options_as_json(options: Options, *, pipe: int) -> Json:
    """Returns the options that were searched.

    Algorithms and the transport of overlapped collectives are left out: they change no prediction.
    """
    values = dataclasses.asdict(options)
    del values["algorithm"]
    if values["overlap"] is not None:
        for name in ("communicators", "max_ctas"):
            del values["overlap"][name]
    if pipe == 1:
        values["pipeline"] = None
    return values


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text("--json", path, json.dumps(content, indent=1, allow_nan=False) + "\n")


# --- CSV -----------------------------------------------------------------------------------------


def plan_as_rows(result: Plan, budget: Budget) -> list[Json]:
    """Returns the configurations of a plan for `write_csv`, each with the request."""
    request = result.request
    asked = {
        "model": request.model_name, "machine": request.machine.name, "gpus": request.num_ranks,
        "sequence_length": request.model.sequence_length, "global_batch": request.batch_size,
    }  # fmt: skip
    return [{**asked, "config": config_as_json(e, request.machine, budget)} for e in result.configs]


def write_csv(path: Path, rows: Sequence[Json]) -> None:
    """Writes a line for each row. A column is a key of the JSON; nested keys are joined by dots.

    A row without a value for a column has an empty cell there.
    """
    flat = [dict(_flat(row)) for row in rows]
    columns = dict.fromkeys(name for row in flat for name in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    write_text("--csv", path, text.getvalue())


def _flat(row: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yields names and values; those of "config" have no prefix, since there is one in each row."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, "" if key == "config" else f"{within}{key}.")
        elif key != "config":
            yield f"{within}{key}", value


# --- Chrome trace --------------------------------------------------------------------------------


def write_chrome_trace(path: Path, step: Timeline, job: Job) -> None:
    """Writes the simulated step for chrome://tracing or Perfetto, with a row for each stream.

    Of many micro-batches, which are all alike on one rank, it writes the first and the last two. In
    a pipeline, where several are in flight at once, it writes all.
    """
    streams = step.streams
    events: list[Json] = []
    for row, name in enumerate(streams):
        place = {"ph": "M", "pid": 0, "tid": row}
        label = f"axis {name}" if name in COMMUNICATING else name
        events.append({**place, "name": "thread_name", "args": {"name": label}})
        events.append({**place, "name": "thread_sort_index", "args": {"sort_index": row}})
    for event in step.events:
        if not _is_drawn(job, event.micro_batch):
            continue
        events.append(
            {
                "ph": "X", "pid": 0, "tid": streams.index(event.stream), "name": event.name,
                "ts": event.start_s * 1e6, "dur": (event.end_s - event.start_s) * 1e6,
                "args": {"micro_batch": event.micro_batch},
            }
        )  # fmt: skip
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    write_text("--timeline", path, json.dumps(trace))


def left_out(path: Path, job: Job) -> str:
    """Returns a note on what `write_chrome_trace` leaves out of the job's step; "" if nothing."""
    parts = job.options.micro_batches
    shown = [str(part + 1) for part in range(parts) if _is_drawn(job, part)]
    if len(shown) == parts:
        return ""
    return f"{path} has micro-batches {', '.join(shown)} of {parts:,}; those between are like them"


def _is_drawn(job: Job, micro_batch: int) -> bool:
    first_or_last = micro_batch == 0 or micro_batch >= job.options.micro_batches - 2
    return first_or_last or job.grid.pipe > 1


# --- The trainer's configuration -----------------------------------------------------------------


NOT_PLANNED = "data.text, data.vocabulary, optim.lr, train.steps, checkpoint.interval"


def write_config(path: Path, estimate: Estimate, *, title: str, model: str) -> None:
    """Writes a configuration of `axonn-ext train`; loads Torch.

    Keys that the planner does not know (text, learning rate) come from `model` if it is a file of
    the trainer; otherwise they are the trainer's defaults.
    """
    from axonn_ext.train.config_file import to_toml

    text = to_toml(trainer_config(estimate, source=model))
    head = (
        f"# Written by axonn-ext plan: {title}.\n"
        f"# Predicted: {duration(estimate.step_time_s)} a step, "
        f"{100 * estimate.peak_fraction:.1f} % of peak ({100 * estimate.whole_peak_fraction:.1f} % "
        f"with all of attention counted), {gigabytes(estimate.memory.total)} a GPU.\n"
    )
    if Path(model).suffix != ".toml":
        head += f"# Set before a run, since the planner does not know them: {NOT_PLANNED}.\n"
    write_text("--write-config", path, f"{head}\n{text}")


def trainer_config(estimate: Estimate, *, source: str) -> Config:
    """Returns a configuration of the trainer.

    source: the model's source. If it is a file of the trainer, its other keys are kept.
    """
    from axonn_ext.train.config import Config, PipelineTable
    from axonn_ext.train.config_file import load_config

    base = Path(source)
    config = load_config(base) if base.suffix == ".toml" and is_file(base) else Config()
    job, model = estimate.job, estimate.job.model
    chosen = job.options
    sizes = dataclasses.asdict(model)
    for other in dataclasses.fields(ModelConfig):
        if other.name not in keys_of(ModelSizes) and sizes.pop(other.name) != other.default:
            raise UserError(f"--write-config: the trainer has no key for the model's {other.name}")
    searched = keys_of(ParallelConfig).keys() - {"algorithm"}
    pipeline = PipelineTable()
    if job.grid.pipe > 1:
        stages = Stages.balanced(model, job.grid.pipe, chosen.pipeline.chunks)
        sizes_of_stages = ",".join(str(len(blocks)) for blocks in stages.blocks)
        pipeline = PipelineTable(**dataclasses.asdict(chosen.pipeline), blocks=sizes_of_stages)
    numbers: Json | None = _options_as_json(chosen, pipe=1)["overlap"]
    carried: Json = {"mode": "off"} if numbers is None else {"mode": "on", **numbers}
    return dataclasses.replace(
        config,
        grid=job.grid,
        model=dataclasses.replace(config.model, implementation="axonn", **sizes),
        train=dataclasses.replace(
            config.train, batch_size=job.batch_size, micro_batches=chosen.micro_batches,
            dtype=chosen.dtype,
        ),
        parallel=dataclasses.replace(
            config.parallel, **{name: getattr(chosen, name) for name in searched}
        ),
        overlap=dataclasses.replace(config.overlap, **carried),
        optim=dataclasses.replace(config.optim, **dataclasses.asdict(chosen.optimizer)),
        pipeline=pipeline,
    )  # fmt: skip
