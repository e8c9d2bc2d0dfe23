"""The tasks of one transformer block."""

from __future__ import annotations

from axonn_ext.planner.step.linears import linear_backward, linear_forward
from axonn_ext.planner.step.rank import FP32, Rank, present
from axonn_ext.planner.step.tasks import Scores, Task
from axonn_ext.spec.family import BLOCK_NORMS


def block_forward(rank: Rank) -> tuple[Task, ...]:
    """Returns the tasks of a block's forward pass."""
    qkv, out, up, down = (linear_forward(rank, w) for w in rank.model.block_linears)
    norms = _norms(rank, backward=False)
    return (*norms["norm_1"], qkv, attention_forward(rank), out, *norms["after_1"],
            *norms["norm_2"], up, _activation(rank, backward=False), down,
            *norms["after_2"])  # fmt: skip


def block_backward(rank: Rank, *, recomputed: bool = False) -> tuple[Task, ...]:
    """Returns the tasks of a block's backward pass, including only attention's recomputation.

    recomputed: the whole block is recomputed before, which is not part of these tasks.
    """
    # Recomputation ends with the Linear that comes first in backward, so its weight is held.
    held = recomputed and rank.options.overlap is not None
    again = (attention_forward(rank),) if rank.options.recomputation.attention else ()
    qkv, out, up, down = (linear_backward(rank, w) for w in rank.model.block_linears)
    if held:
        down = (down[0]._replace(gather=None), down[1])
    norms = _norms(rank, backward=True)
    return (*norms["after_2"], *down, _activation(rank, backward=True), *up, *norms["norm_2"],
            *norms["after_1"], *out, *again, _attention(rank, backward=True), *qkv,
            *norms["norm_1"])  # fmt: skip


def _norms(rank: Rank, *, backward: bool) -> dict[str, tuple[Task, ...]]:
    """Returns the task of each norm that a block may have; none for those it does not have."""
    here = rank.model.traits.norms
    return {
        name: (norm(rank, name, backward=backward),) if name in here else () for name in BLOCK_NORMS
    }


def norm(rank: Rank, name: str, *, backward: bool) -> Task:
    """Returns the task of a norm, and of the addition to the residual stream.

    The statistics of a row cross y in fp32. RMSNorm all-reduces one number in each direction;
    LayerNorm gathers two numbers of each rank in forward, and all-reduces two in backward.
    """
    kind_of_norm = rank.model.traits.norm
    kind = "all_gather" if kind_of_norm.gathers and not backward else "all_reduce"
    sums = rank.collective(kind, "y", kind_of_norm.num_statistics * rank.m_x, FP32, "norm")
    elements = rank.m_x * rank.model.hidden_size // rank.size["y"]
    passes = 8 if backward else 6  # reads and writes of norm and residual together (a guess)
    return Task(
        f"{name} {'backward' if backward else 'forward'}", before=present([sums]),
        touched_bytes=passes * elements * rank.width,
    )  # fmt: skip


def attention_forward(rank: Rank) -> Task:
    """Returns a block's work between the Linears of its attention."""
    return _attention(rank, backward=False)


def _attention(rank: Rank, *, backward: bool) -> Task:
    """Returns causal attention over whole sequences; in `replicated`, y ranks repeat it.

    Windows have fewer operations, at the rate of whole sequences; capped scores are not slower.

    Norms of the queries of all heads, and of the keys, all-reduce a number per row in each
    direction over the axes that split the heads.
    """
    model, over_y = rank.model, rank.options.heads_over_y
    rows = rank.m_y
    of_norms = model.qk_norm_sizes if model.traits.qk_norm == "all" else ()
    sums = [
        rank.collective("all_reduce", axis, rank.m if over_y else rows, FP32, "norm")
        for _ in of_norms
        for axis in (("x", "y") if over_y else ("x",))
    ]
    forward = rows * model.attention_flops_per_token() // rank.size["x"]
    features = model.qkv_size + model.attention_size
    return Task(
        f"attention {'backward' if backward else 'forward'}",
        before=present(sums),
        # Backward computes the scores again: 5 products for forward's 2 (arXiv:2205.14135).
        scores=Scores(
            forward * 5 // 2 if backward else forward, model.sequence_length, model.head_dim
        ),
        touched_bytes=(2 if backward else 1) * rows * features // rank.size["x"] * rank.width,
    )


def _activation(rank: Rank, *, backward: bool) -> Task:
    model = rank.model
    elements = rank.m_y * (model.up_size + model.mlp_size) // rank.size["x"]
    return Task(
        f"activation {'backward' if backward else 'forward'}",
        touched_bytes=(2 if backward else 1) * elements * rank.width,
    )
