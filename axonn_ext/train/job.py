"""A job: a configuration that has passed all checks that need no other process."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from axonn_ext import models
from axonn_ext.kernels import extension
from axonn_ext.optim import LossScaler
from axonn_ext.ranks.communicators import why_none
from axonn_ext.spec import settings
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.pipeline import check_sizes
from axonn_ext.spec.recompute import Recomputation
from axonn_ext.spec.stages import Stages
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.memory import memory_problem
from axonn_ext.train.config import AUTO, EXAMPLES, Config
from axonn_ext.train.corpora import Text, sources_of, text_and_model, text_problems
from axonn_ext.train.rates import Rates, peak_flops_of

if TYPE_CHECKING:
    from axonn_ext.train.samples import Samples

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BYTES_OF_A_TOKEN = 16  # its id and its label, in int64


@dataclass(frozen=True)
class Job:
    """The configuration of a run, and values that follow from it.

    used_model   the model with the run's sequence length, at most that of a pretrained model
    rates        the operations per token, and the machine's peak
    device       the device type: "cpu", or "cuda" for the current GPU
    samples      the prompts of train.samples, if any
    """

    config: Config
    text: Text
    model: ModelConfig
    used_model: ModelConfig
    stages: Stages
    rates: Rates
    device: str
    samples: Samples | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        return DTYPES[self.config.train.dtype]

    def loss_scaler(self) -> LossScaler | None:
        """Returns a new loss scaler; None for dtypes that represent small gradients without it.

        Raises ValueError for incompatible scales.
        """
        train = self.config.train
        if self.dtype != torch.float16:
            return None
        return LossScaler(
            initial_loss_scale=train.initial_loss_scale, min_loss_scale=train.min_loss_scale,
            max_loss_scale=train.max_loss_scale, loss_scale_window=train.loss_scale_window,
        )  # fmt: skip


def prepare(config: Config, *, world_size: int, local_world_size: int | None = None) -> Job:
    """Returns the job if it can run on `world_size` processes.

    local_world_size: the number of processes on each host; default all.

    Raises: UserError with all problems that were found.
    """
    try:
        text, model = text_and_model(config, sources_of(config))
        unfit_texts = text_problems(config, text)
        stages, used_model = config.stages(model), config.at_length(model)
        rates = _rates(config, used_model, stages)
    except ValueError as error:
        raise UserError(str(error)) from None
    job = Job(config, text, model, used_model, stages, rates, device_of(config))
    try:
        job.loss_scaler()
    except ValueError as error:
        raise UserError(f"train.{error}") from None
    # Whether the grid fits the model is checked only if the number of processes is right.
    problems = _process_problems(job, world_size) or _fit_problems(job)
    problems += _device_problems(job, local_world_size or world_size) + _goldfish_problems(config)
    problems += _compile_problems(job) + _sample_problems(config)
    problems += _lora_problems(job) + _early_stop_problems(config) + unfit_texts
    if problems:
        raise UserError(*problems)
    return replace(job, samples=_samples(job))


def _samples(job: Job) -> Samples | None:
    """Returns the prompts of train.samples, if any. Raises UserError for unusable ones."""
    if not job.config.train.samples:
        return None
    from axonn_ext.train.samples import Samples  # most runs have none

    try:
        return Samples.of(job.config, job.text.vocabulary, job.used_model)
    except ValueError as error:
        raise UserError(f"train.samples: {error}") from None


def _rates(config: Config, model: ModelConfig, stages: Stages) -> Rates:
    """Returns the rates. Raises ValueError if train.machine is unknown or has no such peak."""
    peak = peak_flops_of(config, config.grid.size)
    recomputation = config.parallel.recomputation
    if config.model.implementation == "plain":  # recomputes nothing
        recomputation = Recomputation()
    return Rates.of(model, recomputation, stages, peak)


def device_of(config: Config) -> str:
    """Returns the type of device, "cpu" or "cuda"."""
    asked = config.train.device
    if asked != AUTO:
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def _process_problems(job: Job, world_size: int) -> list[str]:
    config, shape = job.config, job.config.grid
    if config.model.implementation == "plain":
        for key, is_set in (("data.order examples", config.data.order == EXAMPLES),
                            ("lora.rank", config.lora.rank > 0),
                            ("optim.name muon", config.optim.is_muon),
                            ("optim.groups", bool(config.optim.groups)),
                            ("train.compile", config.train.compile),
                            ("train.samples", bool(config.train.samples)),
                            ("optim.zero", config.optim.zero > 0)):  # fmt: skip
            if is_set:
                return [f"model.implementation plain does not support {key}; use axonn"]
    if config.lora.rank and config.optim.is_muon:
        return ["optim.name: expected adamw with lora.rank, whose adapters have no matrices of "
                "blocks, got muon"]  # fmt: skip
    if config.lora.rank and shape.pipe > 1:
        return [f"lora.rank: expected 0 on pipeline stages (pipe={shape.pipe}), got an adapter"]
    if config.lora.rank and config.optim.groups:
        return ["optim.groups: expected none with lora.rank, which freezes all but the adapters"]
    if config.optim.zero > 1 and shape.pipe > 1:
        return [f"optim.zero: expected 0 or 1 on pipeline stages (pipe={shape.pipe}), got 2"]
    if config.optim.ema_decay and config.optim.offload == "disk":
        return [
            f"optim.ema_decay: expected 0 with optim.offload disk, got {config.optim.ema_decay:g}"
        ]
    folder = config.optim.offload_folder
    if folder and not Path(folder).is_dir():
        return [f"optim.offload_folder: expected a folder that exists, got {folder}"]
    if config.lora.rank and config.parallel.heads_over_y:
        return ["parallel.heads_over_y: expected false with lora.rank, got true"]
    if config.model.implementation == "plain" and (shape.size > 1 or world_size > 1):
        return [
            f"model.implementation plain runs in one process, got grid {shape} "
            f"and {_processes(world_size)}; use --grid x=1, and one process"
        ]
    if shape.size != world_size:
        product = " * ".join(f"{axis}={size}" for axis, size in shape.as_dict().items())
        return [
            f"grid {shape} needs {_processes(shape.size)} ({product}), but got {world_size}; "
            "change the grid (--grid auto chooses one) or the number of processes"
        ]
    return []


def _goldfish_problems(config: Config) -> list[str]:
    table, length = config.goldfish, config.model.sequence_length
    if not table.k or table.h <= length:
        return []
    return [
        f"goldfish.h: expected at most {length} (model.sequence_length), got {table.h}: "
        "the first h tokens of a sequence are always learned"
    ]


def _lora_problems(job: Job) -> list[str]:
    rank, largest = job.config.lora.rank, job.model.hidden_size
    if rank <= largest:
        return []
    return [f"lora.rank: expected at most {largest}, the model's features, got {rank}"]


def _early_stop_problems(config: Config) -> list[str]:
    patience, why = config.train.early_stop_patience, _why_no_evaluations(config)
    if not patience or not why:
        return []
    return [f"train.early_stop_patience: expected 0 without evaluations ({why}), got {patience}"]


def _why_no_evaluations(config: Config) -> str:
    """Returns the key that turns evaluations off; "" if they are on."""
    if not config.train.eval_interval:
        return "train.eval_interval is 0"
    held_out = config.is_stream or config.data.held_out  # a stream has a key of its own
    return "" if held_out else "data.held_out is 0"


def _compile_problems(job: Job) -> list[str]:
    config = job.config
    if not config.train.compile:
        return []
    if config.grid.pipe > 1 and config.pipeline.defers:
        return [
            "train.compile: expected false where weight gradients are deferred "
            f"(pipeline.schedule {config.pipeline.schedule}), got true; set pipeline.schedule to "
            "1f1b, or with message_driven pipeline.defer_weights to false"
        ]
    if job.device == "cpu" and not shutil.which(settings.cxx()):
        return [
            "train.compile: expected a C++ compiler, which torch.compile needs on the CPU, got no "
            f"program {settings.cxx()}; install g++, or set CXX to another compiler"
        ]
    if job.device == "cuda" and not importlib.util.find_spec("triton"):
        return ["train.compile: needs Triton on GPUs: pip install triton"]
    return []


def _sample_problems(config: Config) -> list[str]:
    if not config.train.samples:
        return []
    if config.grid.pipe > 1:
        return [
            f"train.samples: expected none on pipeline stages (pipe={config.grid.pipe}), got "
            f"{config.train.samples}"
        ]
    why = _why_no_evaluations(config)
    if not why:
        return []
    return [f"train.samples: expected none without evaluations ({why}), got {config.train.samples}"]


def _device_problems(job: Job, local_world_size: int) -> list[str]:
    overlap, algorithm = job.config.overlap_options(), job.config.parallel.algorithm
    needs_own = overlap is not None and overlap.needs_own_communicators
    if job.device == "cpu":
        text = "overlap.communicators own and overlap.max_ctas are for GPUs, and the device is cpu"
        return [text] if needs_own else []
    if not torch.cuda.is_available():
        return ["train.device cuda: torch sees no GPU here; use cpu or auto"]
    problems = _fused_problems(job, local_world_size) if algorithm == "fused" else []
    why = why_none(extension.cuda) if needs_own else ""
    if why:
        problems.append(f"overlap.communicators own, or overlap.max_ctas: {why}")
    return problems


def _fused_problems(job: Job, local_world_size: int) -> list[str]:
    """Returns why the ops would refuse "fused" on GPUs, as far as one rank can tell."""
    shape = job.config.grid
    # Linears use "fused" along x, y and z, the axes that vary fastest in rank order.
    num_together = shape.x * shape.y * shape.z
    why = torch.ops.axonn._why_no_fused_here(
        torch.device("cuda", 0),
        job.dtype,
        max(shape.x, shape.y, shape.z),
        local_world_size % num_together != 0,
    )
    return [f"parallel.algorithm fused: {why}; use auto, chunked or sequential"] if why else []


def _fit_problems(job: Job) -> list[str]:
    """Returns one problem that lists every rule violated by the grid, model and batch."""
    config, train = job.config, job.config.train
    if train.batch_size % train.micro_batches:
        return [
            f"train.batch_size {train.batch_size} must be divisible by "
            f"train.micro_batches {train.micro_batches}"
        ]
    try:
        check_sizes(
            config.pipeline.schedule, stages=config.grid.pipe, micro_batches=train.micro_batches,
            chunks=config.pipeline.chunks,
        )  # fmt: skip
    except ValueError as error:
        return [f"pipeline: {error}"]
    rules = models.check(
        job.used_model, config.parallel, config.grid, batch_size=config.micro_batch_size,
        pretrained=bool(config.model.pretrained),
    )  # fmt: skip
    if not rules:
        return []
    return ["\n  ".join([f"grid {config.grid} does not fit this model and batch:", *rules])]


def check_memory(job: Job, *, ranks_here: int) -> None:
    """Raises UserError if even a job's parameters and tokens do not fit this host.

    A job needs far more than these, so no job that fits is refused.
    """
    config, shape = job.config, job.config.grid
    tokens = config.micro_batch_size * config.model.sequence_length * BYTES_OF_A_TOKEN
    # Frozen weights have neither gradients nor moments.
    is_frozen = config.lora.rank or any(group.frozen for group in config.optim.groups)
    bytes_each = job.dtype.itemsize if is_frozen else _bytes_of_a_parameter(job)
    parameters = job.model.num_parameters() * bytes_each
    rank = parameters / (shape.x * shape.y * shape.z * shape.pipe) + tokens / (shape.data * shape.z)
    what = f"a model of {job.model.num_parameters():,} parameters, with this batch,"
    problem = memory_problem(what, rank * ranks_here, job.device)
    if problem:
        raise UserError(problem)


def _bytes_of_a_parameter(job: Job) -> float:
    """Returns a lower bound on the bytes of a trained parameter on a rank's device."""
    options, data, width = job.config.optim, job.config.grid.data, job.dtype.itemsize
    parts = options.num_parts(data)
    gradient = width / parts if options.zero > 1 else width
    elsewhere = {"none": (), "cpu": ("cuda",), "disk": ("cuda", "cpu")}[options.offload]
    state = 0 if job.device in elsewhere else options.bytes_of_state(width, data) / parts
    return width + gradient + state


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
