"""Bytes that autograd keeps from forward for backward: what torch's saved-tensor hooks count.

Legend, per rank and micro-batch: m rows (tokens) of a (data, z) group, mx and my those of the
residual stream and of attention, MLP and logits (`sharded`: m / Gx and m / Gy; else m); H hidden,
Q qkv, U up, F inside the MLP, V vocabulary features, whole; Gx, Gy sizes of axes.

Follows axonn_ext.nn. What shares memory counts once: q, k and v lie in qkv's result, and the
Linear after attention keeps attention's own. Attention is one of torch's fused kernels; the one
that keeps S x S scores is never counted (CUDA takes it for fp32 with grouped key-value heads).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from axonn_ext.planner.job import Job
from axonn_ext.spec.family import RMS_NORM
from axonn_ext.spec.model import ModelConfig

_FP32, _INT64, _BOOL = 4, 8, 1


class ModelSizes(NamedTuple):
    """Sizes of a model that are the same on every grid, in elements; see the legend.

    kv: features of all keys. block: of a block's four matrices; runs[i]: of the i of them in a row,
    the first after the last, that have most. num_parameters: tensors.
    """

    rms_norm: bool
    gated: bool
    tied: bool
    layers: int
    hidden: int
    qkv: int
    up: int
    mlp: int
    vocab: int
    heads: int
    kv: int
    length: int
    rotary: int
    block: int
    runs: tuple[int, int, int, int]
    num_parameters: int


@lru_cache(maxsize=256)
def sizes_of(model: ModelConfig) -> ModelSizes:
    """The model's properties, computed once."""
    traits = model.traits
    # Four Linears and two norms in a block; the table, that of positions, and the last norm.
    per_block = 4 * (1 + traits.has_biases) + 2 * traits.norm.num_vectors
    ends = 1 + (not traits.rotary) + traits.norm.num_vectors
    matrices = [w.n * w.k for w in model.block_linears]
    pairs = [matrices[i - 1] + matrices[i] for i in range(4)]
    return ModelSizes(
        rms_norm=traits.norm is RMS_NORM,
        gated=traits.gated,
        tied=model.tie_embeddings,
        layers=model.num_layers,
        hidden=model.hidden_size,
        qkv=model.qkv_size,
        up=model.up_size,
        mlp=model.mlp_size,
        vocab=model.vocab_size,
        heads=model.num_heads,
        kv=model.kv_heads * model.head_dim,
        length=model.sequence_length,
        rotary=model.sequence_length * model.head_dim if traits.rotary else 0,
        block=sum(matrices),
        runs=(0, max(matrices), max(pairs), sum(matrices) - min(matrices)),
        num_parameters=per_block * model.num_layers + ends + (not model.tie_embeddings),
    )


class Kept(NamedTuple):
    """Bytes kept from a forward pass.

    block        by one block, without recomputation
    block_input  by one block that is recomputed
    ends         by the embedding, the last norm and lm_head
    loss         fp32 probabilities and labels
    weights      whole weights: those that backward does not gather again (of blocks that are not
                 recomputed, and of lm_head), and the tied table
    """

    block: int
    block_input: int
    ends: int
    loss: int
    weights: int

    def total(self, num_layers: int, *, recompute: bool) -> int:
        """Of a whole model."""
        each = self.block_input if recompute else self.block
        return num_layers * each + self.ends + self.loss + self.weights


def kept_of(job: Job) -> Kept:
    """What each rank of a legal job keeps of one micro-batch."""
    size, options, grid = sizes_of(job.model), job.options, job.grid
    x, y, width, m = grid.x, grid.y, options.width, job.rows
    sharded = options.layout == "sharded"
    mx, my = (m // x, m // y) if sharded else (m, m)
    gathered = sharded and options.save_gathered
    h = size.hidden // y
    stream = mx * h * width
    wide_stream = m * h * width if gathered else stream  # a Linear's input
    statistics = mx * (_FP32 if size.rms_norm or y > 1 else 2 * width)
    norm = stream + statistics + wide_stream

    # qkv's result, attention's and its log-sum-exp in fp32.
    of_x = my * width // x
    attention = of_x * (size.qkv + size.hidden) + my * size.heads // x * _FP32
    mlp = of_x * (size.up + size.mlp)
    if size.rotary:  # q and k rotated, with the angles of each
        attention += of_x * (size.hidden + size.kv) + 4 * size.rotary * width
    if size.gated:  # silu(gate)
        mlp += of_x * size.mlp
    if gathered and y > 1:
        whole = m * width // x
        attention += whole * size.hidden
        mlp += (whole - of_x) * size.mlp  # instead of its part

    positions = 0 if size.rotary else mx * _INT64
    return Kept(
        block=2 * norm + attention + mlp,
        block_input=stream,
        ends=norm + m * (_INT64 + _BOOL) + positions,
        loss=my * (size.vocab // x * _FP32 + _INT64 + 2 * _BOOL) + _FP32,
        weights=_kept_weights(job, size) * width,
    )


def _kept_weights(job: Job, size: ModelSizes) -> int:
    """Elements. With overlap the weights are the orchestrator's, within its budget."""
    grid, options = job.grid, job.options
    if grid.z == 1 or options.overlap is not None:
        return 0
    kept = size.vocab * size.hidden if size.tied or not options.reshard_after_forward else 0
    if not (options.reshard_after_forward or options.recompute):
        kept += size.layers * size.block
    return kept // (grid.x * grid.y)
