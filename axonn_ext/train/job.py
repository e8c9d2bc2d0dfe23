"""A job: a configuration that has passed all checks that need no other process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from axonn_ext import _library, models
from axonn_ext.communicators import why_none
from axonn_ext.data import Source, StoredVocabulary, Vocabulary, padded_size, vocabulary_of
from axonn_ext.optim import LossScaler
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import ParallelConfig
from axonn_ext.spec.pipeline import check_sizes
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.spec.recompute import Recomputation
from axonn_ext.spec.stages import Stages
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config import EXAMPLES, Config, ModelTable
from axonn_ext.train.corpora import sources_of, text_problems
from axonn_ext.train.rates import Rates, peak_flops_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Job:
    """The configuration of a run, and values that follow from it."""

    config: Config
    grid_shape: GridShape
    model: ModelConfig
    parallel: ParallelConfig
    pipeline: PipelineOptions
    stages: Stages
    vocabulary: Vocabulary | StoredVocabulary
    sources: tuple[Source, ...]

    @property
    def device(self) -> str:
        """The type of device on which the job runs: "cpu", or "cuda" for the current GPU."""
        return device_of(self.config)

    @property
    def used_model(self) -> ModelConfig:
        """The model with the sequence length that is used, at most that of a pretrained one."""
        length = self.config.model.sequence_length
        return dataclasses.replace(self.model, sequence_length=length)

    @property
    def rates(self) -> Rates:
        """The operations of a token, and the machine's peak. Raises ValueError for train.machine
        that is not known or has no peak for the dtype."""
        peak = peak_flops_of(self.config, self.grid_shape.size)
        recomputation = self.parallel.recomputation
        if self.config.model.implementation == "plain":  # which recomputes nothing
            recomputation = Recomputation()
        return Rates.of(self.used_model, recomputation, self.stages, peak)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        return DTYPES[self.config.train.dtype]

    def loss_scaler(self) -> LossScaler | None:
        """Returns a new scaler of the loss; None for dtypes that hold small gradients without it.

        Raises ValueError for scales that do not fit each other.
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
        sources = sources_of(config)
        vocabulary, model = vocabulary_and_model(config, sources)
        stages = config.stages(model)
    except ValueError as error:
        raise UserError(str(error)) from None
    job = Job(
        config, config.grid, model, config.parallel, config.pipeline, stages, vocabulary, sources
    )
    try:
        _ = job.rates
    except ValueError as error:
        raise UserError(str(error)) from None
    try:
        job.loss_scaler()
    except ValueError as error:
        raise UserError(f"train.{error}") from None
    # Whether the grid fits the model is checked only if the number of processes is right.
    problems = _process_problems(job, world_size) or _fit_problems(job)
    problems += _device_problems(job, local_world_size or world_size) + _goldfish_problems(config)
    problems += _lora_problems(job)
    problems += text_problems(config, vocabulary, sources)
    if problems:
        raise UserError(*problems)
    return job


def vocabulary_and_model(
    config: Config, sources: tuple[Source, ...]
) -> tuple[Vocabulary | StoredVocabulary, ModelConfig]:
    """Opens the vocabulary, and describes the model for it.

    Raises ValueError for sizes that do not fit each other, or a vocabulary that does not exist.
    """
    pretrained = _read_pretrained(config) if config.model.pretrained else None
    size = config.model.vocab_size if pretrained is None else pretrained.vocab_size
    vocabulary = vocabulary_of(sources, config.vocabulary, vocab_size=size)
    if pretrained is None:
        return vocabulary, config.model_config(_vocab_size(config, vocabulary))
    if vocabulary.num_tokens > size:
        raise ValueError(
            f"model.pretrained: expected a vocabulary of at least {vocabulary.num_tokens}, the "
            f"tokens of {config.vocabulary}, got {size}"
        )
    return vocabulary, pretrained


def _read_pretrained(config: Config) -> ModelConfig:
    """Returns the model of model.pretrained. Raises ValueError if other keys contradict it."""
    table, default = config.model, ModelTable()
    free = ("pretrained", "implementation", "sequence_length")
    for key in dataclasses.fields(table):
        value = getattr(table, key.name)
        if key.name not in free and value != getattr(default, key.name):
            raise ValueError(
                f"model.{key.name}: expected nothing beside model.pretrained, whose config.json "
                f"decides it, got {value}"
            )
    from axonn_ext.pretrained import read_model

    found = read_model(Path(table.pretrained))
    if table.sequence_length > found.sequence_length:
        raise ValueError(
            f"model.sequence_length: expected at most {found.sequence_length}, as config.json of "
            f"{table.pretrained} says, got {table.sequence_length}"
        )
    return found


def device_of(config: Config) -> str:
    """Returns the type of device, "cpu" or "cuda"."""
    asked = config.train.device
    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def _vocab_size(config: Config, vocabulary: Vocabulary | StoredVocabulary) -> int:
    """Returns the size of the model's vocabulary.

    Raises ValueError if it is smaller than the number of tokens.
    """
    asked, needed = config.model.vocab_size, vocabulary.num_tokens
    if asked and asked < needed:
        name = f"data.vocabulary {config.vocabulary}"
        if isinstance(vocabulary, StoredVocabulary):
            name = vocabulary.name
        raise ValueError(
            f"model.vocab_size: expected at least {needed}, the tokens of {name}, got {asked}; 0 "
            "takes what is needed"
        )
    return asked or padded_size(needed)


def _process_problems(job: Job, world_size: int) -> list[str]:
    shape, config = job.grid_shape, job.config
    if config.model.implementation == "plain":
        for key, is_set in (("data.order examples", config.data.order == EXAMPLES),
                            ("lora.rank", config.lora.rank > 0),
                            ("optim.zero", config.optim.zero > 0)):  # fmt: skip
            if is_set:
                return [f"model.implementation plain does not support {key}; use axonn"]
    if config.lora.rank and shape.pipe > 1:
        return [f"lora.rank: expected 0 on pipeline stages (pipe={shape.pipe}), got an adapter"]
    if config.optim.zero > 1 and shape.pipe > 1:
        return [f"optim.zero: expected 0 or 1 on pipeline stages (pipe={shape.pipe}), got 2"]
    folder = config.optim.offload_folder
    if folder and not Path(folder).is_dir():
        return [f"optim.offload_folder: expected a folder that exists, got {folder}"]
    if config.lora.rank and job.parallel.heads_over_y:
        return ["parallel.heads_over_y: expected false with lora.rank, got true"]
    if job.config.model.implementation == "plain" and (shape.size > 1 or world_size > 1):
        return [
            f"model.implementation plain runs in one process, got grid {shape} "
            f"and {_processes(world_size)}; use --grid x=1, and one process"
        ]
    if shape.size != world_size:
        product = " * ".join(f"{axis}={size}" for axis, size in shape.as_dict().items())
        return [
            f"grid {shape} needs {_processes(shape.size)} ({product}), but got {world_size}; "
            "change the grid or the number of processes"
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


def _device_problems(job: Job, local_world_size: int) -> list[str]:
    overlap = job.config.overlap_options()
    needs_own = overlap is not None and overlap.needs_own_communicators
    if job.device == "cpu":
        text = "overlap.communicators own and overlap.max_ctas are for GPUs, and the device is cpu"
        return [text] if needs_own else []
    if not torch.cuda.is_available():
        return ["train.device cuda: torch sees no GPU here; use cpu or auto"]
    problems = _fused_problems(job, local_world_size) if job.parallel.algorithm == "fused" else []
    why = why_none(_library.cuda) if needs_own else ""
    if why:
        problems.append(f"overlap.communicators own, or overlap.max_ctas: {why}")
    return problems


def _fused_problems(job: Job, local_world_size: int) -> list[str]:
    """Returns the reason why the ops would refuse "fused" on GPUs, as far as one rank can tell."""
    shape = job.grid_shape
    # Linears use "fused" along x, y and z, which are the fastest axes in rank order.
    num_together = shape.x * shape.y * shape.z
    why = torch.ops.axonn._why_no_fused_here(
        torch.device("cuda", 0),
        job.dtype,
        max(shape.x, shape.y, shape.z),
        local_world_size % num_together != 0,
    )
    return [f"parallel.algorithm fused: {why}; use auto, chunked or sequential"] if why else []


def _fit_problems(job: Job) -> list[str]:
    """Returns one problem that lists all rules by which the grid does not fit model and batch."""
    train = job.config.train
    if train.batch_size % train.micro_batches:
        return [
            f"train.batch_size {train.batch_size} must be divisible by "
            f"train.micro_batches {train.micro_batches}"
        ]
    try:
        check_sizes(
            job.pipeline.schedule, stages=job.grid_shape.pipe, micro_batches=train.micro_batches,
            chunks=job.pipeline.chunks,
        )  # fmt: skip
    except ValueError as error:
        return [f"pipeline: {error}"]
    rules = models.check(
        job.used_model, job.parallel, job.grid_shape, batch_size=job.config.micro_batch_size
    )
    if not rules:
        return []
    return ["\n  ".join([f"grid {job.grid_shape} does not fit this model and batch:", *rules])]


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
