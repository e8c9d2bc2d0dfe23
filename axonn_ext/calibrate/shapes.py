"""The sizes of timed ops: the grammar of `--shapes`, the presets, and the checks against a grid."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import ParallelConfig
from axonn_ext.spec.rules import check
from axonn_ext.terminal.errors import UserError

GEMM_OPS = ("ag-gemm", "gemm-rs", "gemm-ar")
ALL_GEMM_OPS = "gemm-ops"  # each of GEMM_OPS
OPS = (*GEMM_OPS, "linear", "block")
# The role of a Linear that issues such an op.
ROLE_OF = {"ag-gemm": "expand", "gemm-rs": "contract", "gemm-ar": "contract"}


class GemmShape(NamedTuple):
    """The global sizes of a product [M, K] @ [K, N].

    For a Linear, M, N and K are rows, out features and in features.
    """

    M: int
    N: int
    K: int

    @property
    def num_elements(self) -> int:
        """The elements of the three matrices."""
        return self.M * self.N + self.N * self.K + self.M * self.K


class BlockShape(NamedTuple):
    """The global sizes of a transformer block."""

    batch: int
    sequence: int
    hidden: int
    heads: int

    @property
    def num_elements(self) -> int:
        """The elements of the weights (12 hidden^2) and of the input, without activations."""
        return 12 * self.hidden**2 + self.batch * self.sequence * self.hidden

    def model(self, grid: GridShape) -> ModelConfig:
        """Returns a GPT-2 model of one such block."""
        return ModelConfig(
            vocab_size=grid.x * grid.z,  # as small as the grid allows, since lm_head is not run
            hidden_size=self.hidden,
            num_layers=1,
            num_heads=self.heads,
            sequence_length=self.sequence,
            tie_embeddings=False,
            # Larger than GPT-2's 0.02: the block's contribution to the residual stream must be as
            # large as the stream itself, or its errors would not show.
            init_std=self.hidden**-0.5,
        )


Shape = GemmShape | BlockShape

# M is one sequence of the model's training length. The Linears of "expand" are qkv and up (with
# gate, where there is one), those of "contract" are the out-projection and down.
# Sources: Touvron et al., arXiv:2307.09288 (70B: hidden 8192, 64 heads, 8 of them key-value heads,
# MLP 28672); Brown et al., arXiv:2005.14165, table 2.1 (175B: hidden 12288, MLP 49152).
GEMM_PRESETS = {
    ("llama-70b", "expand"): (GemmShape(4096, 10240, 8192), GemmShape(4096, 57344, 8192)),
    ("llama-70b", "contract"): (GemmShape(4096, 8192, 8192), GemmShape(4096, 8192, 28672)),
    ("gpt3", "expand"): (GemmShape(2048, 36864, 12288), GemmShape(2048, 49152, 12288)),
    ("gpt3", "contract"): (GemmShape(2048, 12288, 12288), GemmShape(2048, 12288, 49152)),
}
# The MLPs in papers on fused matmuls, as N, K of "expand". "contract" has K, N.
# Sizes: Touvron et al., arXiv:2307.09288 (Llama 2 7B); Llama team, arXiv:2407.21783 (Llama 3 8B,
# 70B, 405B); Yang et al., arXiv:2407.10671 (Qwen2 72B); Brown et al., arXiv:2005.14165 (GPT-3).
# Chang et al., arXiv:2406.06858 (Flux), and Zheng et al., arXiv:2504.19442 (Triton-distributed)
# time them from M = 1024 on. Below that, fused kernels are slower than separate ones.
PUBLISHED = "published"
PUBLISHED_LAYERS = (
    (11008, 4096), (14336, 4096), (28672, 8192), (29568, 8192), (53248, 16384), (49152, 12288)
)  # fmt: skip
PUBLISHED_ROWS = (64, 256, 1024, 2048, 4096, 8192, 16384)
BLOCK_PRESETS = {
    "gpt2": (BlockShape(8, 1024, 768, 12),),  # the smallest model of Radford et al. 2019
    "gpt3": (BlockShape(1, 2048, 12288, 96),),
}
DEFAULTS: dict[str, Shape] = {
    **dict.fromkeys((*GEMM_OPS, ALL_GEMM_OPS), GemmShape(1024, 1024, 1024)),
    "linear": GemmShape(512, 1024, 1024),
    "block": BlockShape(4, 256, 512, 8),
}


def parse_shapes(op: str, texts: list[str], *, role: str = "expand") -> tuple[Shape, ...]:
    """Returns the shapes for texts, which are sizes or presets; the op's default if there are none.

    role: the role of a preset's Linears.
    Raises: UserError for a text that is neither.
    """
    if not texts:
        return (DEFAULTS[op],)
    return tuple(dict.fromkeys(shape for text in texts for shape in _parse(op, text, role)))


def published_shapes(text: str, role: str) -> tuple[GemmShape, ...]:
    """Returns the shapes of "published", or of "published:M,M,..." for some values of M, in a role.

    Raises: UserError for an M that is not among the published ones.
    """
    chosen: tuple[int, ...] = PUBLISHED_ROWS
    if text != PUBLISHED:
        rows = text.removeprefix(f"{PUBLISHED}:").split(",")
        known = [str(m) for m in PUBLISHED_ROWS]
        if unknown := [m for m in rows if m not in known]:
            raise UserError(
                f"--shapes: {PUBLISHED} has M of {', '.join(known)}, got {unknown[0]!r} in {text!r}"
            )
        chosen = tuple(m for m in PUBLISHED_ROWS if str(m) in rows)
    layers = PUBLISHED_LAYERS if role == "expand" else [(k, n) for n, k in PUBLISHED_LAYERS]
    return tuple(GemmShape(m, n, k) for n, k in layers for m in chosen)


def is_published(text: str) -> bool:
    return text.partition(":")[0] == PUBLISHED


def is_preset(text: str) -> bool:
    """Whether the text is a preset of layers, whose sizes depend on the role."""
    return is_published(text) or any(text == name for name, _ in GEMM_PRESETS)


def _parse(op: str, text: str, role: str) -> tuple[Shape, ...]:
    role = ROLE_OF.get(op, role)
    if op != "block" and is_published(text):
        return published_shapes(text, role)
    if op == "block":
        names = list(BLOCK_PRESETS)
        preset: tuple[Shape, ...] | None = BLOCK_PRESETS.get(text)
    else:
        names = [*dict.fromkeys(name for name, _ in GEMM_PRESETS), PUBLISHED]
        preset = GEMM_PRESETS.get((text, role))
    return preset or (parse_sizes(op, text, names),)


def is_size(text: str) -> bool:
    """Whether the text is a whole number with no more digits than a size can have."""
    return re.fullmatch(r"\s*[0-9]{1,13}\s*", text) is not None


def parse_sizes(op: str, text: str, presets: Sequence[str]) -> Shape:
    """Returns the shape whose sizes the text lists. Raises: UserError for any other text."""
    kind = BlockShape if op == "block" else GemmShape
    sizes = text.split(",")
    if len(sizes) != len(kind._fields) or not all(map(is_size, sizes)):
        raise UserError(
            f'--shapes: {op} takes "{",".join(kind._fields)}" or one of {", ".join(presets)}, '
            f"got {text!r}"
        )
    shape = kind(*(int(size) for size in sizes))
    if min(shape) < 1:
        raise UserError(f"--shapes: every size must be at least 1, got {text!r}")
    return shape


def problems(op: str, shape: Shape, grid: GridShape, *, role: str, layout: str) -> list[str]:
    """Returns why the op cannot be timed in that shape on that grid; an empty list if it can."""
    where = f"{op} {describe(shape)} on {grid.short()}: "
    if grid.data > 1:
        return [f"{where}data={grid.data} must be 1: nothing of one layer moves over data"]
    if isinstance(shape, BlockShape):
        try:
            model = shape.model(grid)
        except ValueError as error:
            return [f"{where}{error}"]
        parallel = ParallelConfig(layout=layout)
        return [where + text for text in check(model, parallel, grid, batch_size=shape.batch)]
    if op != "linear" and grid.size != grid.x:
        return [f"{where}the group of a matmul is the axis x; y and z must be 1"]
    rules = _gemm_rules(op, grid) if op != "linear" else _linear_rules(grid, role, layout)
    return [
        f"{where}{size} must be divisible by {parts}"
        for size, parts in rules
        if getattr(shape, size) % parts
    ]


def _gemm_rules(op: str, grid: GridShape) -> list[tuple[str, int]]:
    sizes = {"ag-gemm": ("M", "N"), "gemm-rs": ("M", "K"), "gemm-ar": ("K",)}[op]
    return [(size, grid.x) for size in sizes]


def _linear_rules(grid: GridShape, role: str, layout: str) -> list[tuple[str, int]]:
    r, s = (grid.x, grid.y) if role == "expand" else (grid.y, grid.x)
    rows = math.lcm(grid.z * r, grid.z * s) if layout == "sharded" else grid.z
    return [("M", rows), ("N", r * grid.z), ("K", s)]


def describe(shape: Shape) -> str:
    """Returns the shape like "M,N,K = 512,1024,1024"."""
    return f"{','.join(shape._fields)} = {','.join(map(str, shape))}"
