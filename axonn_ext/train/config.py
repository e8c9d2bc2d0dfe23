"""The configuration of a training run, with a frozen dataclass for each table of the TOML file.

`_key` declares a key with its default, its meaning in one line, and its legal values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Any, TypeVar

from axonn_ext.spec.family import FAMILIES
from axonn_ext.spec.goldfish import WINDOWS, Goldfish
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.optimizer import BUCKET_ELEMENTS, OFFLOADS, OptimizerOptions
from axonn_ext.spec.parallel import (
    ALGORITHMS,
    COMMUNICATORS,
    LAYOUTS,
    Overlap,
    ParallelConfig,
)
from axonn_ext.spec.pipeline import SCHEDULES
from axonn_ext.spec.pipeline_options import TRANSPORTS, PipelineOptions
from axonn_ext.spec.presets import DEFAULT_MODEL
from axonn_ext.spec.recompute import EXPECTED, is_policy
from axonn_ext.spec.stages import Stages
from axonn_ext.terminal.arguments import MOST_THREADS

T = TypeVar("T")
MAX_SEED = 2**32 - 1
EXAMPLES = "examples"  # of [data] order
MAX_NUMBER = 3.4e38  # a larger number is infinite in fp32


@dataclass(frozen=True)
class KeyInfo:
    """What a key means and which values it takes.

    expected, accepts: of values of a certain form, the form in words, and whether a value has it.
    """

    doc: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None  # exclusive minimum
    expected: str = ""
    accepts: Callable[[Any], bool] | None = None


def _key(default: T, doc: str, **limits: Any) -> T:
    return field(default=default, metadata={"key": KeyInfo(doc, **limits)})


def key_info(key: Field[Any]) -> KeyInfo:
    """Returns the meaning and legal values of one field of a table's dataclass."""
    info = key.metadata["key"]
    assert isinstance(info, KeyInfo)
    return info


@dataclass(frozen=True)
class GridTable:
    """The number of processes along each axis; the product is the number of processes."""

    x: int = _key(1, "splits output features of layers; has the fastest links", minimum=1)
    y: int = _key(1, "splits input features of layers", minimum=1)
    z: int = _key(1, "splits weights and the batch, like FSDP", minimum=1)
    data: int = _key(1, "splits the batch; weights are copied", minimum=1)
    pipe: int = _key(1, "stages of a pipeline, which split the blocks", minimum=1)


@dataclass(frozen=True)
class ModelTable:
    """The model."""

    implementation: str = _key(
        "axonn", "axonn, or plain torch.nn modules in one process", choices=("axonn", "plain")
    )
    family: str = _key(DEFAULT_MODEL.family, " or ".join(FAMILIES), choices=FAMILIES)
    vocab_size: int = _key(0, "0: what data.vocabulary needs, rounded up to 128", minimum=0)
    hidden_size: int = _key(DEFAULT_MODEL.hidden_size, "features of the residual stream", minimum=1)
    num_layers: int = _key(DEFAULT_MODEL.num_layers, "transformer blocks", minimum=1)
    num_heads: int = _key(DEFAULT_MODEL.num_heads, "attention heads", minimum=1)
    num_kv_heads: int = _key(0, "key-value heads (grouped queries); 0: num_heads", minimum=0)
    intermediate_size: int = _key(0, "features inside the MLP; 0: the family's usual", minimum=0)
    head_size: int = _key(0, "features of a head; 0: hidden_size / num_heads", minimum=0)
    sequence_length: int = _key(DEFAULT_MODEL.sequence_length, "tokens of a sequence", minimum=1)
    tie_embeddings: bool = _key(
        DEFAULT_MODEL.tie_embeddings, "the embedding table is the output layer's weight, too"
    )
    rope_theta: float = _key(DEFAULT_MODEL.rope_theta, "base of the rotary frequencies", above=0)
    norm_eps: float = _key(DEFAULT_MODEL.norm_eps, "added to the variance in norms", above=0)
    init_std: float = _key(DEFAULT_MODEL.init_std, "standard deviation of initial weights", above=0)
    pretrained: str = _key(
        "", "a Hugging Face folder to begin with, which decides all other keys but sequence_length"
    )


@dataclass(frozen=True)
class DataTable:
    """The text."""

    text: str = _key("", "file, folder or token files; empty: the sources of the Python that runs")
    mixture: str = _key("", "several of these with weights, instead of text: PATH=0.7,PATH=0.3")
    order: str = _key(
        "windows", "random windows; or, once an epoch, all documents, or all examples, packed",
        choices=("windows", "documents", EXAMPLES),
    )  # fmt: skip
    vocabulary: str = _key(
        "", "bytes, or a file of the tokenizers library; empty: that of model.pretrained, or bytes"
    )
    max_bytes: int = _key(0, "of text; read no more; 0: all (8 MB of Python's sources)", minimum=0)
    epochs: int = _key(0, "order examples: nothing is read after so many; 0: no end", minimum=0)
    held_out: float = _key(0.05, "fraction at the end, for evaluation only", minimum=0, maximum=0.9)
    on_unusable: str = _key(
        "skip",
        "order examples: one has nothing to learn, or no room for it: skip it, or end the run",
        choices=("skip", "stop"),
    )
    date: str = _key(
        "", "YYYY-MM-DD, which chat templates are told; empty: the day on which the run first began"
    )


@dataclass(frozen=True)
class LoraTable:
    """Low-rank adapters, which train alone."""

    rank: int = _key(0, "of the updates; 0: none, all parameters train", minimum=0)
    alpha: float = _key(16.0, "the updates are multiplied by alpha / rank", above=0)
    targets: str = _key("all-linear", "or names of Linears, such as q_proj,v_proj")
    start: str = _key("", "a folder in PEFT's format to begin with, which also decides alpha")


@dataclass(frozen=True)
class GoldfishTable:
    """Goldfish loss: targets that are never learned, so that no text is repeated word for word."""

    k: int = _key(
        0, "about one target in k is left out; 0: none",
        expected="0 or a whole number >= 2", accepts=lambda k: k == 0 or k >= 2,
    )  # fmt: skip
    h: int = _key(Goldfish.h, "tokens whose hash decides about a target", minimum=1)
    window: str = _key(
        Goldfish.window, "they are those before the target, or end with the target", choices=WINDOWS
    )


@dataclass(frozen=True)
class OptimTable:
    """AdamW; warm-up, then cosine."""

    lr: float = _key(1e-3, "highest learning rate", above=0)
    final_lr_fraction: float = _key(0.1, "of lr, at the end of the cosine", minimum=0, maximum=1)
    warmup_steps: int = _key(20, "steps of linear warm-up", minimum=0)
    weight_decay: float = _key(0.1, "on matrices only", minimum=0)
    beta1: float = _key(0.9, "decay of the first moment", minimum=0, maximum=0.9999)
    beta2: float = _key(0.95, "decay of the second moment", minimum=0, maximum=0.999999)
    eps: float = _key(1e-8, "added to the root of the second moment", above=0)
    clip_norm: float = _key(1.0, "largest global gradient norm; 0: no clipping", minimum=0)
    zero: int = _key(
        0, "over data divide 1: moments and masters; 2: gradients, too (ZeRO)", minimum=0, maximum=2
    )
    offload: str = _key(
        "none", "keep moments and masters in the host's memory (cpu), or in files", choices=OFFLOADS
    )
    bucket_elements: int = _key(
        BUCKET_ELEMENTS, "that zero exchanges and offload updates together", minimum=1
    )
    offload_folder: str = _key("", "for offload disk; empty: that of temporary files")


@dataclass(frozen=True)
class TrainTable:
    """The run."""

    steps: int = _key(200, "optimizer steps", minimum=1)
    batch_size: int = _key(16, "sequences of a step, over all processes", minimum=1)
    micro_batches: int = _key(1, "parts a step is computed in (gradient accumulation)", minimum=1)
    dtype: str = _key(
        "fp32", "fp32; or bf16 or fp16, with fp32 master weights", choices=("fp32", "bf16", "fp16")
    )
    device: str = _key(
        "auto", "cpu, cuda, or auto: cuda where there are GPUs", choices=("auto", "cpu", "cuda")
    )
    verify: str = _key(
        "off", "auto: begin with axonn-ext verify on machines without its results; off: do not",
        choices=("off", "auto"),
    )  # fmt: skip
    on_nonfinite: str = _key(
        "stop", "a loss or gradient is not finite: end the run, or skip the step",
        choices=("stop", "skip"),
    )  # fmt: skip
    initial_loss_scale: float = _key(
        2.0**16, "of fp16: multiplies the loss; halved if gradients overflow", above=0
    )
    min_loss_scale: float = _key(2.0**10, "an overflow at this scale is an error", above=0)
    max_loss_scale: float = _key(2.0**24, "the loss scale rises no further", above=0)
    loss_scale_window: int = _key(
        200, "steps in a row without overflow, after which the loss scale is doubled", minimum=1
    )
    machine: str = _key(
        "", "the planner's machine, or its file, of whose peak the run prints its %; empty: none"
    )
    seed: int = _key(0, "of the weights and of the order of the text", minimum=0, maximum=MAX_SEED)
    eval_interval: int = _key(50, "steps from one evaluation to the next; 0: none", minimum=0)
    eval_batches: int = _key(4, "micro-batches of one evaluation", minimum=1)
    threads: int = _key(0, "threads of a process; 0: the host's cores shared out", minimum=0,
                       maximum=MOST_THREADS)  # fmt: skip


@dataclass(frozen=True)
class ParallelTable:
    """How the model is run on the grid; changes no result beyond rounding."""

    layout: str = _key(
        ParallelConfig.layout, "sharded rows, or AxoNN's own replicated ones", choices=LAYOUTS
    )
    heads_over_y: bool = _key(
        ParallelConfig.heads_over_y, "y splits heads, not sequences, in attention (sharded)"
    )
    save_gathered: bool = _key(
        ParallelConfig.save_gathered, "keep gathered inputs for backward: more memory"
    )
    reshard_after_forward: bool = _key(
        ParallelConfig.reshard_after_forward, "gather weights over z again in backward"
    )
    recompute: str = _key(
        ParallelConfig.recompute,
        "none, attention, every:K (one of K blocks), every:N/K or full",
        expected=EXPECTED, accepts=is_policy,
    )  # fmt: skip
    algorithm: str = _key(ParallelConfig.algorithm, "of the fused ops", choices=ALGORITHMS)


@dataclass(frozen=True)
class OverlapTable:
    """Collectives of weights (z) and gradients (z, data) that run beside computation."""

    mode: str = _key(
        "off",
        "on; off: the ops do it all; at_once: as on, each waited for where it starts",
        choices=("off", "on", "at_once"),
    )
    prefetch: int = _key(Overlap.prefetch, "weights gathered ahead of use", minimum=0)
    gathered_bytes: int = _key(
        Overlap.gathered_bytes, "of gathered weights held at once", minimum=0
    )
    deferred: int = _key(Overlap.deferred, "weight gradients under way over z", minimum=0)
    bucket_bytes: int = _key(Overlap.bucket_bytes, "of gradients that cross together", minimum=1)
    communicators: str = _key(
        Overlap.communicators, "of NCCL, on GPUs; auto: own if they can be", choices=COMMUNICATORS
    )
    max_ctas: int = _key(
        Overlap.max_ctas, "SMs that a collective takes at most; 0: NCCL chooses", minimum=0
    )


@dataclass(frozen=True)
class PipelineTable:
    """How the stages of grid.pipe take turns with the micro-batches of a step."""

    schedule: str = _key(
        PipelineOptions.schedule, "who runs what when; docs/pipeline.md", choices=SCHEDULES
    )
    chunks: int = _key(PipelineOptions.chunks, "stages on each rank (interleaved)", minimum=1)
    in_flight: int = _key(
        PipelineOptions.in_flight, "micro-batches held, a stage to come (message_driven)", minimum=1
    )
    defer_weights: bool = _key(
        PipelineOptions.defer_weights, "weight gradients fill idle time (message_driven)"
    )
    deferred_bytes: int = _key(
        PipelineOptions.deferred_bytes,
        "that these may hold; 0: those of 2 x pipe micro-batches",
        minimum=0,
    )
    transport: str = _key(
        PipelineOptions.transport, "of messages; auto: through memory inside a host",
        choices=TRANSPORTS,
    )  # fmt: skip
    blocks: str = _key("", "of each stage, such as 5,6,6,5; empty: balanced by operations")


@dataclass(frozen=True)
class CheckpointTable:
    """What a run saves of itself, in the folder checkpoints of its own."""

    interval: int = _key(0, "steps from one checkpoint to the next; 0: none", minimum=0)
    keep_last: int = _key(2, "the newest that are kept", minimum=1)
    keep_every: int = _key(0, "those of multiples of so many steps stay, too; 0: none", minimum=0)
    background: bool = _key(True, "write behind the next steps")
    resume: str = _key("", "auto: the newest of this run; or a checkpoint, or a run's folder")


@dataclass(frozen=True)
class Config:
    """A whole training run; `config_file` reads and writes it."""

    grid: GridTable = field(default_factory=GridTable)
    model: ModelTable = field(default_factory=ModelTable)
    data: DataTable = field(default_factory=DataTable)
    lora: LoraTable = field(default_factory=LoraTable)
    goldfish: GoldfishTable = field(default_factory=GoldfishTable)
    optim: OptimTable = field(default_factory=OptimTable)
    train: TrainTable = field(default_factory=TrainTable)
    parallel: ParallelTable = field(default_factory=ParallelTable)
    overlap: OverlapTable = field(default_factory=OverlapTable)
    pipeline: PipelineTable = field(default_factory=PipelineTable)
    checkpoint: CheckpointTable = field(default_factory=CheckpointTable)

    @property
    def vocabulary(self) -> str:
        """The name of the vocabulary."""
        if self.data.vocabulary:
            return self.data.vocabulary
        pretrained = self.model.pretrained
        return f"{pretrained}/tokenizer.json" if pretrained else "bytes"

    @property
    def micro_batch_size(self) -> int:
        """The sequences of one micro-batch over all processes."""
        return self.train.batch_size // self.train.micro_batches

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.model.sequence_length

    def grid_shape(self) -> GridShape:
        """The shape of the grid."""
        table = self.grid
        return GridShape(x=table.x, y=table.y, z=table.z, data=table.data, pipe=table.pipe)

    def model_config(self, vocab_size: int) -> ModelConfig:
        """Returns the model with that vocabulary. Raises ValueError for sizes that do not fit."""
        table = self.model
        return ModelConfig(
            family=table.family,
            vocab_size=vocab_size,
            hidden_size=table.hidden_size,
            num_layers=table.num_layers,
            num_heads=table.num_heads,
            num_kv_heads=table.num_kv_heads or None,
            intermediate_size=table.intermediate_size or None,
            head_size=table.head_size or None,
            sequence_length=table.sequence_length,
            tie_embeddings=table.tie_embeddings,
            rope_theta=table.rope_theta,
            norm_eps=table.norm_eps,
            init_std=table.init_std,
        )

    def parallel_config(self) -> ParallelConfig:
        """Returns the options. Raises ValueError for options that exclude each other."""
        table = self.parallel
        return ParallelConfig(
            layout=table.layout,
            heads_over_y=table.heads_over_y,
            save_gathered=table.save_gathered,
            reshard_after_forward=table.reshard_after_forward,
            recompute=table.recompute,
            algorithm=table.algorithm,
        )

    def pipeline_options(self) -> PipelineOptions:
        """Returns the options. Raises ValueError for options that exclude each other."""
        table = self.pipeline
        return PipelineOptions(
            schedule=table.schedule, chunks=table.chunks, in_flight=table.in_flight,
            defer_weights=table.defer_weights, deferred_bytes=table.deferred_bytes,
            transport=table.transport,
        )  # fmt: skip

    def optimizer_options(self) -> OptimizerOptions:
        """The options of AdamW's state."""
        table = self.optim
        return OptimizerOptions(table.zero, table.offload, table.bucket_elements)

    def goldfish_options(self) -> Goldfish | None:
        """Returns the options of Goldfish loss; None if it is off."""
        table = self.goldfish
        return Goldfish(table.k, table.h, table.window) if table.k else None

    def stages(self, model: ModelConfig) -> Stages:
        """Returns which blocks each stage has. Raises ValueError if they do not fit the model."""
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

    def overlap_options(self) -> Overlap | None:
        """Returns the options of overlap; None if it is off and the ops issue all collectives."""
        table = self.overlap
        if table.mode == "off":
            return None
        return Overlap(
            prefetch=table.prefetch,
            gathered_bytes=table.gathered_bytes,
            deferred=table.deferred,
            bucket_bytes=table.bucket_bytes,
            wait_at_once=table.mode == "at_once",
            communicators=table.communicators,
            max_ctas=table.max_ctas,
        )
