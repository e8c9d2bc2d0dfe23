"""The configuration of a training run, with a frozen dataclass for each table of the TOML file.

A table whose keys are options of axonn_ext.spec reuses or extends the dataclass of these options.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from axonn_ext.spec.files.keys import key, keys_of
from axonn_ext.spec.goldfish import Goldfish
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import DEFAULT_MODEL, ModelConfig, ModelSizes
from axonn_ext.spec.optimizer import (
    ADJUSTMENTS,
    DECAY_TYPES,
    SCHEDULES,
    OptimizerOptions,
    ParameterGroup,
)
from axonn_ext.spec.parallel import Overlap, ParallelConfig
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.spec.stages import Stages
from axonn_ext.spec.stream import PREFIX, StreamOptions
from axonn_ext.terminal.arguments import MOST_THREADS

MAX_SEED = 2**32 - 1
SINKS = ("tensorboard", "wandb", "mlflow")
EXAMPLES = "examples"  # of [data] order
_BLOCK_WEIGHTS = 4  # of qkv, the out-projection, up and down
AUTO = "auto"  # of [train] device and verify, [checkpoint] resume and [metrics] sinks


def _usual(name: str) -> Any:
    """Redeclares a key of a model with the trainer's default."""
    return field(default=getattr(DEFAULT_MODEL, name), metadata={"key": keys_of(ModelSizes)[name]})


@dataclass(frozen=True)
class ModelTable(ModelSizes):
    """The model; its vocabulary size may come from the text."""

    implementation: str = key(
        "axonn", "modules of the model: axonn, or plain (torch.nn, in one process)",
        choices=("axonn", "plain"),
    )  # fmt: skip
    vocab_size: int = key(
        0, "number of tokens; 0: what data.vocabulary needs, rounded up to a multiple of 128",
        minimum=0,
    )  # fmt: skip
    hidden_size: int = _usual("hidden_size")
    num_layers: int = _usual("num_layers")
    num_heads: int = _usual("num_heads")
    sequence_length: int = _usual("sequence_length")
    pretrained: str = key(
        "", "Hugging Face folder to start from; sets all keys of the model but sequence_length"
    )


@dataclass(frozen=True)
class DataTable:
    """The text."""

    text: str = key(
        "", "file, folder, token files, or hf:NAME, a stream of datasets; empty: Python's sources"
    )
    mixture: str = key("", "several texts with weights, instead of data.text: PATH=0.7,PATH=0.3")
    order: str = key(
        "windows", "windows (at random), or all documents or examples (packed) in every epoch",
        choices=("windows", "documents", EXAMPLES),
    )  # fmt: skip
    vocabulary: str = key(
        "", "bytes, or a file of the tokenizers library; empty: model.pretrained's, or bytes"
    )
    max_bytes: int = key(
        0, "maximum bytes to read of each text; 0: all (8 MB of Python's sources)", minimum=0
    )
    epochs: int = key(
        0, "maximum epochs that train.steps may read (order examples); 0: no limit", minimum=0
    )
    held_out: float = key(
        0.05, "fraction at the end of the data, for evaluation only", minimum=0, maximum=0.9
    )
    on_unusable: str = key(
        "skip", "skip examples with nothing to learn or too long a prompt, or stop the run",
        choices=("skip", "stop"),
    )  # fmt: skip
    date: str = key(
        "", "date that chat templates see, YYYY-MM-DD; empty: the day the run first started"
    )


@dataclass(frozen=True)
class StreamTable(StreamOptions):
    """Which documents of data.text = "hf:..." are read, and in what order."""


@dataclass(frozen=True)
class LoraTable:
    """Low-rank adapters; nothing else is trained."""

    rank: int = key(0, "rank of the adapters; 0: no adapters, all parameters train", minimum=0)
    alpha: float = key(16.0, "numerator of the LoRA scale alpha / rank", above=0)
    targets: str = key(
        "all-linear", "Linears that get adapters: all-linear, or names such as q_proj,v_proj"
    )
    start: str = key("", "folder of a PEFT adapter to start from, which also sets alpha")


@dataclass(frozen=True)
class GoldfishTable(Goldfish):
    """Goldfish loss: never learns some targets, so that no text is repeated word for word."""

    k: int = key(
        0, "Goldfish loss leaves out about one target in this many; 0: plain loss",
        expected="0 or a whole number >= 2", accepts=lambda k: k == 0 or k >= 2,
    )  # fmt: skip


@dataclass(frozen=True)
class OptimTable(OptimizerOptions):
    """The optimizer; its learning rate."""

    lr: float = key(1e-3, "peak learning rate", above=0)
    schedule: str = key(
        "cosine", "learning rate after warm-up: constant, linear, cosine or wsd (constant, decay)",
        choices=SCHEDULES,
    )  # fmt: skip
    final_lr_fraction: float = key(
        0.1, "learning rate of the last step, as a fraction of lr", minimum=0, maximum=1
    )
    warmup_steps: int = key(20, "number of steps of linear warm-up", minimum=0)
    warmup_fraction: float = key(
        0.0, "linear warm-up as a fraction of train.steps; 0: warmup_steps", minimum=0, maximum=1
    )
    decay_fraction: float = key(
        0.1, "decay at the end of wsd, as a fraction of train.steps", minimum=0, maximum=1
    )
    decay_type: str = key(
        "linear", "decay at the end of wsd: linear or 1-sqrt", choices=DECAY_TYPES
    )
    weight_decay: float = key(0.1, "weight decay, for matrices only", minimum=0)
    beta1: float = key(0.9, "decay rate of the first moment", minimum=0, maximum=0.9999)
    beta2: float = key(0.95, "decay rate of the second moment", minimum=0, maximum=0.999999)
    eps: float = key(1e-8, "epsilon added to the root of the second moment", above=0)
    momentum: float = key(
        0.95, "decay rate of Muon's momentum (Nesterov)", minimum=0, maximum=0.9999
    )
    adjust_lr: str = key(
        "match_rms_adamw", "scale of Muon's lr: match_rms_adamw (updates as large as AdamW's), or "
        "original (sqrt(rows / columns), at least 1)",
        choices=ADJUSTMENTS,
    )  # fmt: skip
    ema_decay: float = key(
        0.0, "decay of an average of the weights, for evaluation and the final model; 0: none",
        minimum=0, maximum=0.999999,
    )  # fmt: skip
    clip_norm: float = key(
        1.0, "largest global norm of gradients, which are clipped to it; 0: no clipping", minimum=0
    )
    groups: tuple[ParameterGroup, ...] = key(
        (), "options of parameters by their names: names, lr_factor, weight_decay, frozen",
        row=ParameterGroup,
    )  # fmt: skip
    offload_folder: str = key("", "folder for offload = disk; empty: the system's temporary folder")


@dataclass(frozen=True)
class TrainTable:
    """The run."""

    steps: int = key(200, "number of optimizer steps", minimum=1)
    batch_size: int = key(16, "sequences per step, over all processes", minimum=1)
    micro_batches: int = key(1, "micro-batches per step (gradient accumulation)", minimum=1)
    dtype: str = key(
        "fp32", "dtype of weights and activations: fp32, or bf16 or fp16 with fp32 master weights",
        choices=("fp32", "bf16", "fp16"),
    )  # fmt: skip
    compile: bool = key(
        False, "compile blocks with torch.compile; overlap.prefetch and .deferred then count blocks"
    )
    device: str = key(
        "auto", "device to train on: cpu, cuda, or auto (cuda if there are GPUs)",
        choices=("auto", "cpu", "cuda"),
    )  # fmt: skip
    verify: str = key(
        "off", "auto: first run axonn-ext verify on machines without its results; off: do not",
        choices=("off", "auto"),
    )  # fmt: skip
    on_nonfinite: str = key(
        "stop", "stop the run at a loss or gradient that is not finite, or skip the step",
        choices=("stop", "skip"),
    )  # fmt: skip
    initial_loss_scale: float = key(
        2.0**16, "first loss scale, for fp16; halved when gradients overflow", above=0
    )
    min_loss_scale: float = key(
        2.0**10, "lowest loss scale; on_nonfinite says what an overflow at it does", above=0
    )
    max_loss_scale: float = key(2.0**24, "highest loss scale", above=0)
    loss_scale_window: int = key(
        200, "steps in a row without overflow that double the loss scale", minimum=1
    )
    machine: str = key(
        "", "machine for % of peak: a name or file of the planner; empty: not reported"
    )
    seed: int = key(
        0, "random seed for the weights and the order of the text", minimum=0, maximum=MAX_SEED
    )
    eval_interval: int = key(50, "steps between evaluations; 0: no evaluation", minimum=0)
    eval_batches: int = key(4, "micro-batches per evaluation", minimum=1)
    samples: str = key(
        "", "file of prompts to continue at each evaluation, one per line, or .jsonl; empty: none"
    )
    sample_tokens: int = key(32, "largest number of tokens to generate per sample", minimum=1)
    early_stop_patience: int = key(
        0, "evaluations in a row without improvement that end the run; 0: no early stop", minimum=0
    )
    early_stop_min_delta: float = key(
        0.0, "decrease of the evaluation loss that must be exceeded to improve", minimum=0
    )
    threads: int = key(
        0, "CPU threads per process; 0: its share of the host's cores", minimum=0,
        maximum=MOST_THREADS,
    )  # fmt: skip


def _are_sinks(text: str) -> bool:
    """Whether a text names sinks, or classes of the user's own."""
    names = [name.strip() for name in text.split(",")] if text else []
    return all(name in SINKS or re.fullmatch(r"[\w.]+:\w+", name) for name in names)


@dataclass(frozen=True)
class MetricsTable:
    """Where the metrics go in addition to metrics.jsonl."""

    sinks: str = key(
        "auto", "tensorboard, wandb, mlflow, MODULE:NAME; auto: tensorboard where it is installed",
        expected=f"auto, or names of {', '.join(SINKS)} or MODULE:NAME, separated by commas",
        accepts=lambda text: text == AUTO or _are_sinks(text),
    )  # fmt: skip
    project: str = key(
        "axonn_ext", "project of wandb, or experiment of mlflow", expected="a name", accepts=bool
    )

    @property
    def names(self) -> list[str]:
        """The named sinks; none for auto."""
        given = "" if self.sinks == AUTO else self.sinks
        return [name.strip() for name in given.split(",") if name.strip()]


@dataclass(frozen=True)
class OverlapTable(Overlap):
    """Collectives of weights (z) and gradients (z, data) that overlap with computation."""

    mode: str = key(
        "off", "on: gather weights ahead, and sum gradients during backward; off: do neither",
        choices=("off", "on"),
    )  # fmt: skip


@dataclass(frozen=True)
class PipelineTable(PipelineOptions):
    """How the stages of grid.pipe take turns with the micro-batches of a step."""

    blocks: str = key(
        "", "number of blocks of each stage, such as 5,6,6,5; empty: balanced by operations"
    )


@dataclass(frozen=True)
class CheckpointTable:
    """Checkpoints of a run, saved in the subfolder checkpoints of its folder."""

    interval: int = key(0, "steps between checkpoints; 0: no checkpoints", minimum=0)
    keep_last: int = key(2, "number of latest checkpoints to keep", minimum=1)
    keep_every: int = key(
        0, "also keep checkpoints at multiples of this many steps; 0: none", minimum=0
    )
    background: bool = key(True, "write checkpoints while the next steps run")
    resume: str = key(
        "", "checkpoint to continue from: auto (the latest of this run), or a path to one or a run"
    )


@dataclass(frozen=True)
class Config:
    """A whole training run; `config_file` reads and writes it."""

    grid: GridShape = field(default_factory=GridShape)
    model: ModelTable = field(default_factory=ModelTable)
    data: DataTable = field(default_factory=DataTable)
    stream: StreamTable = field(default_factory=StreamTable)
    lora: LoraTable = field(default_factory=LoraTable)
    goldfish: GoldfishTable = field(default_factory=GoldfishTable)
    optim: OptimTable = field(default_factory=OptimTable)
    train: TrainTable = field(default_factory=TrainTable)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    overlap: OverlapTable = field(default_factory=OverlapTable)
    pipeline: PipelineTable = field(default_factory=PipelineTable)
    checkpoint: CheckpointTable = field(default_factory=CheckpointTable)
    metrics: MetricsTable = field(default_factory=MetricsTable)

    @property
    def vocabulary(self) -> str:
        """The name of the vocabulary."""
        if self.data.vocabulary:
            return self.data.vocabulary
        pretrained = self.model.pretrained
        return f"{pretrained}/tokenizer.json" if pretrained else "bytes"

    @property
    def text_key(self) -> str:
        """The key that names the text."""
        return "data.mixture" if self.data.mixture else "data.text"

    @property
    def is_stream(self) -> bool:
        """Whether data.text is a stream of `datasets`."""
        return self.data.text.startswith(PREFIX)

    @property
    def micro_batch_size(self) -> int:
        """The sequences of one micro-batch over all processes."""
        return self.train.batch_size // self.train.micro_batches

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.model.sequence_length

    def model_config(self, vocab_size: int) -> ModelConfig:
        """Returns the model with that vocabulary size. Raises ValueError for incompatible sizes."""
        sizes = {name: getattr(self.model, name) for name in keys_of(ModelConfig)}
        return ModelConfig(**sizes | {"vocab_size": vocab_size})

    def at_length(self, model: ModelConfig) -> ModelConfig:
        """Returns the model with the run's sequence length, at most that of a pretrained one."""
        return replace(model, sequence_length=self.model.sequence_length)

    def goldfish_options(self) -> Goldfish | None:
        """Returns the options of Goldfish loss; None if it is off."""
        return self.goldfish if self.goldfish.k else None

    def overlap_options(self) -> Overlap | None:
        """Returns the overlap options; None if overlap is off and the ops issue all collectives."""
        overlap = self.overlap if self.overlap.mode == "on" else None
        if overlap is None or not self.train.compile:
            return overlap
        # The weights of a compiled block are gathered together, and its gradients come together.
        return replace(
            overlap,
            prefetch=_BLOCK_WEIGHTS * overlap.prefetch, deferred=_BLOCK_WEIGHTS * overlap.deferred,
        )  # fmt: skip

    def stages(self, model: ModelConfig) -> Stages:
        """Returns the blocks of each stage. Raises ValueError if they do not fit the model."""
        pipe, chunks, asked = self.grid.pipe, self.pipeline.chunks, self.pipeline.blocks
        if not asked:
            return Stages.balanced(model, pipe, chunks)
        try:
            sizes = [int(size) for size in asked.split(",")]
        except ValueError:
            sizes = []
        if len(sizes) != pipe * chunks or sum(sizes) != model.num_layers or min(sizes) < 1:
            raise ValueError(
                f"pipeline.blocks: expected {pipe * chunks} numbers >= 1 that add up to the "
                f"{model.num_layers} blocks of the model, separated by commas, got {asked!r}"
            )
        return Stages.of_sizes(sizes, pipe)
