"""Computes the bytes that autograd saves for backward, as torch's saved-tensor hooks count them.

Legend, per rank and micro-batch: m rows (tokens) of a (data, z) group; mx rows of the residual
stream, my rows of attention, MLP and logits (in `sharded` m / Gx and m / Gy, else m); H hidden, Q
qkv, U up, F inside the MLP and V vocabulary features, all unsharded; Gx, Gy sizes of axes.

The numbers follow the modules of axonn_ext.nn. Every block counts as one that rotates
and, if any has a window, as one with it. Tensors that share memory count once. For example,
q, k and v are views of the result of qkv; and the result of attention is saved both by attention
and by the Linear after it. Attention is assumed to be one of torch's fused kernels. torch's kernel
that saves S x S scores is never counted, although torch uses it on CUDA for fp32 with grouped
key-value heads.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from axonn_ext.planner.job import Job
from axonn_ext.planner.step.stage_models import StageShare, share_of
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.recompute import Recomputation
from axonn_ext.spec.rules import ATTENTION_ROWS

_FP32, _INT64, _BOOL = 4, 8, 1


class ModelSizes(NamedTuple):
    """Sizes of a model that are the same on every grid, in elements; see the legend.

    norms, parallel: as in Family. attention: the features of all queries. kv: those of all keys.
    block: the elements of the four matrices of a block.
    logits: how many tensors of the logits' size backward needs.
    rotary: the elements of a table of cosines or sines. rotations: the pairs of them.
    window: that of blocks with a window, if it is shorter than a sequence; else 0.
    runs[i]: the largest number of elements of i successive matrices of a block, where the first
        matrix follows the last.
    block_tensors, norm_vectors: the number of parameter tensors of a block, and of a norm.
    """

    rms_norm: bool
    norms: tuple[str, ...]
    parallel: bool
    gated: bool
    relu: bool
    tied: bool
    layers: int
    hidden: int
    attention: int
    qkv: int
    up: int
    mlp: int
    vocab: int
    heads: int
    kv_heads: int
    kv: int
    length: int
    qk_norm: str
    rotary: int
    rotations: int
    positions: bool
    window: int
    capped: bool
    logits: int
    block: int
    runs: tuple[int, int, int, int]
    block_tensors: int
    norm_vectors: int

    def num_tensors(self, share: StageShare) -> int:
        """Returns the number of parameter tensors of a stage."""
        first = share.has_first * (1 + self.positions)  # tables of tokens and positions
        last = share.has_last * (self.norm_vectors + 1)
        # Where a stage has both ends, a tied table counts once.
        both = share.has_first and share.has_last and self.tied
        return share.num_layers * self.block_tensors + first + last - both


@lru_cache(maxsize=256)
def sizes_of(model: ModelConfig) -> ModelSizes:
    """Returns the sizes of the model, computed once per model."""
    traits = model.traits
    # A block has four Linears, norms and, in some families, norms of queries and keys.
    per_block = sum(1 + w.bias for w in model.block_linears)
    per_block += len(traits.norms) * traits.norm.num_vectors
    per_block += len(model.qk_norm_sizes)
    matrices = [w.n * w.k for w in model.block_linears]
    window = max(model.window_of(block) or 0 for block in range(model.num_layers))
    rotates = any(model.rotates(block) for block in range(model.num_layers))
    pairs = [matrices[i - 1] + matrices[i] for i in range(4)]
    return ModelSizes(
        rms_norm=not traits.norm.centred,
        norms=traits.norms,
        parallel=traits.parallel,
        gated=traits.gated,
        relu=traits.activation == "relu",
        tied=model.tie_embeddings,
        layers=model.num_layers,
        hidden=model.hidden_size,
        attention=model.attention_size,
        qkv=model.qkv_size,
        up=model.up_size,
        mlp=model.mlp_size,
        vocab=model.vocab_size,
        heads=model.num_heads,
        kv_heads=model.kv_heads,
        kv=model.kv_heads * model.head_dim,
        length=model.sequence_length,
        qk_norm=traits.qk_norm,
        rotary=model.sequence_length * model.rotary_dim if rotates else 0,
        rotations=_rotations(model),
        positions=not traits.rotary,
        window=window if 0 < window < model.sequence_length else 0,
        capped=model.attention_softcap is not None,
        logits=1 if model.logits_softcap is None else 2,
        block=sum(matrices),
        runs=(0, max(matrices), max(pairs), sum(matrices) - min(matrices)),
        block_tensors=per_block,
        norm_vectors=traits.norm.num_vectors,
    )


def _rotations(model: ModelConfig) -> int:
    """Returns how many pairs of tables of cosines and sines a rank has."""
    rope = model.rope_scaling
    if not model.traits.rotary:
        return 0
    has_long = rope is not None and rope.has_long_tables(model.sequence_length)
    return 1 + has_long + (model.local_theta is not None)


class Kept(NamedTuple):
    """The bytes that a forward pass keeps for backward.

    block        kept by one block that is not recomputed as a whole
    block_input  kept by one block that is recomputed as a whole
    ends         kept by the embedding, the last norm and lm_head, as far as the stage has them
    loss         the logits, two fp32 numbers per row, and the labels
    weights      gathered weights that backward does not gather again (those of blocks that are not
                 recomputed as a whole, and of lm_head), and the tied table
    received     the input of a virtual stage, where no block keeps it
    """

    block: int
    block_input: int
    ends: int
    loss: int
    weights: int
    received: int

    def total(self, num_layers: int, recomputation: Recomputation) -> int:
        """Returns the bytes of all parts of a stage with that many blocks."""
        blocks = self.blocks(num_layers, recomputation.num_blocks(num_layers))
        return blocks + self.ends + self.loss + self.weights + self.received

    def blocks(self, count: int, again: int) -> int:
        """Returns the bytes of that many blocks, `again` of which are recomputed as a whole."""
        return again * self.block_input + (count - again) * self.block


def kept_of(job: Job, stage: int = 0) -> Kept:
    """Returns what each rank of a pipe coordinate of a legal job keeps of one micro-batch."""
    return kept_of_share(job, sizes_of(job.placed_model), share_of(job, stage))


def kept_of_share(job: Job, size: ModelSizes, share: StageShare) -> Kept:
    """Returns what each rank with that share of the model keeps of one micro-batch."""
    options, grid, m = job.options, job.grid, job.rows
    mx, my = (m // grid.x, m // grid.y) if options.sharded else (m, m)
    of_block = kept_of_block(job, size)
    positions = mx * _INT64 if size.positions else 0
    first = m * (_INT64 + _BOOL) + positions
    loss = (
        my * (size.vocab // grid.x * options.width * size.logits + 2 * _FP32) + m * _INT64 + _FP32
    )
    # torch's LayerNorm keeps its input, and so does recomputation: here, the first block's input.
    by_block = options.recomputation.blocks or (
        "norm_1" in size.norms and _is_torchs_layer_norm(job, size)
    )
    return Kept(
        block=of_block.whole,
        block_input=of_block.stream,
        ends=of_block.norm * share.has_last + first * share.has_first,
        loss=loss * share.has_last,
        weights=_kept_weights(job, size, share) * options.width,
        received=0 if by_block else of_block.stream * share.backward_sends,
    )


class KeptOfBlock(NamedTuple):
    """The bytes that a block keeps, if it is not recomputed as a whole.

    whole   all of them
    norm    the bytes of one norm, included in `whole`
    stream  the bytes of its input, a rank's rows of the residual stream
    """

    whole: int
    norm: int
    stream: int


def kept_of_block(job: Job, size: ModelSizes) -> KeptOfBlock:
    """Returns what each rank keeps of one block for one micro-batch."""
    options, grid = job.options, job.grid
    x, y, width, m = grid.x, grid.y, options.width, job.rows
    sharded = options.sharded
    mx, my = (m // x, m // y) if sharded else (m, m)
    gathered = sharded and options.save_gathered
    stream = mx * (size.hidden // y) * width
    wide_stream = m * (size.hidden // y) * width if gathered else stream  # a Linear's input
    after = stream + mx * (_FP32 if size.rms_norm or y > 1 else 2 * width)
    norm = after + wide_stream
    num_before = sum(name in size.norms for name in ("norm_1", "norm_2"))
    norms = num_before * norm + (len(size.norms) - num_before) * after
    if size.parallel:
        if num_before == 1 and gathered and x > 1:  # attention and MLP gather the same rows
            norms += wide_stream
        elif num_before == 2 and _is_torchs_layer_norm(job, size):  # both keep the block's input
            norms -= stream
    else:
        norms += (2 - num_before) * wide_stream

    # Attention keeps the result of qkv and its own result, the input of the next Linear.
    of_x = my * width // x
    attention = of_x * (size.qkv + size.attention)
    attends_again = options.recomputation.attention or size.capped
    if size.window and not attends_again and not (gathered and y > 1):
        attention += of_x * size.attention  # the result in pieces, and as one
    if not options.recomputation.attention:
        attention += _between_linears(size, my, x, width)
        if size.qk_norm == "all":  # a number for each row of queries and of keys
            attention += 2 * (m if options.heads_over_y else my) * _FP32
    # ReLU's backward reads the result of ReLU; other activations' backward reads up's result.
    mlp = of_x * (size.mlp if size.relu else size.up + size.mlp)
    if size.gated:  # silu(gate) is kept as well
        mlp += of_x * size.mlp
    if gathered and y > 1:
        whole = m * width // x
        # The gathered input is kept instead of the rank's part, unless something else needs that
        # as well: the backward of attention, unless it is recomputed, and that of ReLU.
        attention += (whole - of_x * attends_again) * size.attention
        mlp += (whole if size.relu else whole - of_x) * size.mlp
    return KeptOfBlock(norms + attention + mlp, norm, stream)


def _is_torchs_layer_norm(job: Job, size: ModelSizes) -> bool:
    """Returns whether norms are torch's LayerNorm, which keeps its input."""
    return not size.rms_norm and job.grid.y == 1


def _between_linears(size: ModelSizes, rows: int, x: int, width: int) -> int:
    """Returns the bytes that attention keeps between its Linears, besides their results."""
    heads = rows * width // x * (size.attention + size.kv)  # as much as q and k
    # The log-sum-exp. Capped scores are computed again, so that they need none.
    kept = 0 if size.capped else rows * size.heads // x * _FP32
    if size.window and not size.capped:
        kept += _mask_elements(size.window) * width
        if size.kv < size.attention:  # repeated keys and values are kept, instead of qkv's result
            kept += rows * width // x * (2 * size.attention - size.kv - size.qkv)
    if size.qk_norm:  # the normalised q and k are kept
        kept += heads
    if size.qk_norm == "head":  # with a number for each head and row
        kept += rows * (size.heads + size.kv_heads) // x * _FP32
    if size.rotary:  # the rotated q and k are kept, with the cosines and sines of the angles
        kept += heads + 2 * size.rotary * width
    return kept


def _mask_elements(window: int) -> int:
    """Returns the elements of the mask that the pieces of a sequence share (nn/windows.py)."""
    rows = min(window, ATTENTION_ROWS)
    return rows * (window + rows)


def deferred_bytes_of(job: Job, stage: int) -> int:
    """Returns the bytes kept for deferred weight gradients of one micro-batch.

    These are the input of each Linear and the gradient of its output.
    """
    size, options, grid = sizes_of(job.placed_model), job.options, job.grid
    x, y, m = grid.x, grid.y, job.rows
    mx, my = (m // x, m // y) if options.sharded else (m, m)
    gathered = options.sharded and options.save_gathered
    stream = mx * size.hidden // y
    wide_stream = m * size.hidden // y if gathered else stream
    wide = m if gathered else my
    block = 2 * wide_stream + wide * (size.attention + size.mlp) // x  # inputs
    block += 2 * stream + my * (size.qkv + size.up) // x  # gradients
    share = share_of(job, stage)
    head = (wide_stream + my * size.vocab // x) * share.has_last
    return (share.num_layers * block + head) * options.width


def _kept_weights(job: Job, size: ModelSizes, share: StageShare) -> int:
    """Returns the elements of Kept.weights.

    With overlap there are none: gathered weights then count toward the orchestrator's budget
    (Overlap.gathered_bytes), see gathered.py.
    """
    grid, options = job.grid, job.options
    if grid.z == 1 or options.overlap is not None:
        return 0
    keeps_table = share.has_last and (size.tied or not options.reshard_after_forward)
    kept = size.vocab * size.hidden if keeps_table else 0
    if not options.reshard_after_forward:
        again = options.recomputation.num_blocks(share.num_layers)
        kept += (share.num_layers - again) * size.block
    return kept // (grid.x * grid.y)
