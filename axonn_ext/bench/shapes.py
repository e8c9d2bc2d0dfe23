"""Sizes of what is timed: the grammar of `--shapes`, the presets, and what a grid must divide."""

from __future__ import annotations

import math
from typing import NamedTuple

from axonn_ext.grid import GridShape
from axonn_ext.models import ModelConfig, ParallelConfig, check
from axonn_ext.train.errors import UserError

GEMM_OPS = ("ag-gemm", "gemm-rs", "gemm-ar")
OPS = (*GEMM_OPS, "linear", "block")


class GemmShape(NamedTuple):
    """Global sizes of a product [M, K] @ [K, N]; of a Linear: rows, out-features, in-features."""

    M: int
    N: int
    K: int


class BlockShape(NamedTuple):
    """Global sizes of a transformer block."""

    batch: int
    sequence: int
    hidden: int
    heads: int

    def model(self, grid: GridShape) -> ModelConfig:
        """A GPT-2 model of one such block."""
        return ModelConfig(
            vocab_size=grid.x * grid.z,  # as small as the grid allows: it is not run
            hidden_size=self.hidden,
            num_layers=1,
            num_heads=self.heads,
            sequence_length=self.sequence,
            tie_embeddings=False,
            # Not GPT-2's 0.02: what a block adds shall be as large as what it adds it to, or its
            # errors would not show.
            init_std=self.hidden**-0.5,
        )


Shape = GemmShape | BlockShape

# One sequence of the length that the model was trained with. "expand": qkv, and gate and up (up);
# "contract": the out-projection and down.
# Sources: Touvron et al., arXiv:2307.09288 (70B: hidden 8192, 64 heads, 8 of them key-value heads,
# MLP 28672); Brown et al., arXiv:2005.14165, table 2.1 (175B: hidden 12288, MLP 49152).
GEMM_PRESETS = {
    ("llama-70b", "expand"): (GemmShape(4096, 10240, 8192), GemmShape(4096, 57344, 8192)),
    ("llama-70b", "contract"): (GemmShape(4096, 8192, 8192), GemmShape(4096, 8192, 28672)),
    ("gpt3", "expand"): (GemmShape(2048, 36864, 12288), GemmShape(2048, 49152, 12288)),
    ("gpt3", "contract"): (GemmShape(2048, 12288, 12288), GemmShape(2048, 12288, 49152)),
}
BLOCK_PRESETS = {
    "gpt2": (BlockShape(8, 1024, 768, 12),),  # Radford et al. 2019, the smallest
    "gpt3": (BlockShape(1, 2048, 12288, 96),),
}
DEFAULTS: dict[str, Shape] = {
    **dict.fromkeys(GEMM_OPS, GemmShape(1024, 1024, 1024)),
    "linear": GemmShape(512, 1024, 1024),
    "block": BlockShape(4, 256, 512, 8),
}


def parse_shapes(op: str, texts: list[str], *, role: str = "expand") -> tuple[Shape, ...]:
    """The shapes that the texts, sizes or presets, stand for; the op's default for none.

    role: of "linear", whose presets are those of the layers in that role.
    Raises: UserError for what is neither.
    """
    if not texts:
        return (DEFAULTS[op],)
    return tuple(dict.fromkeys(shape for text in texts for shape in _parse(op, text, role)))


def _parse(op: str, text: str, role: str) -> tuple[Shape, ...]:
    kind = BlockShape if op == "block" else GemmShape
    if op == "block":
        names = list(BLOCK_PRESETS)
        preset: tuple[Shape, ...] | None = BLOCK_PRESETS.get(text)
    else:
        if op != "linear":
            role = "expand" if op == "ag-gemm" else "contract"
        names = list(dict.fromkeys(name for name, _ in GEMM_PRESETS))
        preset = GEMM_PRESETS.get((text, role))
    if preset:
        return preset
    sizes = text.split(",")
    if len(sizes) != len(kind._fields) or not all(s.strip().isdecimal() for s in sizes):
        raise UserError(
            f'--shapes: {op} takes "{",".join(kind._fields)}" or one of {", ".join(names)}, '
            f"got {text!r}"
        )
    shape = kind(*(int(size) for size in sizes))
    if min(shape) < 1:
        raise UserError(f"--shapes: every size must be at least 1, got {text!r}")
    return (shape,)


def problems(op: str, shape: Shape, grid: GridShape, *, role: str, layout: str) -> list[str]:
    """Why the op cannot be timed in that shape on that grid, with the numbers; empty if it can."""
    where = f"{op} {describe(shape)} on {short_grid(grid)}: "
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
    """As "M,N,K = 512,1024,1024"."""
    return f"{','.join(shape._fields)} = {','.join(map(str, shape))}"


def short_grid(grid: GridShape) -> str:
    """The axes with several ranks, as "x=2,y=2"."""
    sizes = [f"{axis}={size}" for axis, size in grid.as_dict().items() if size > 1]
    return ",".join(sizes) or "x=1"
