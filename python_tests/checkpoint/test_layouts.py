"""Which rank writes which block: synthetic plans of thousands of ranks, without communication."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from axonn_ext import GridShape, models
from axonn_ext.checkpoint.layout import Layout, coords, file_name, grid_of, in_turn
from axonn_ext.checkpoint.manifest import MANIFEST, Manifest, StoredTensor, block_key, index_name
from axonn_ext.checkpoint.reading import read_manifest
from axonn_ext.checkpoint.shards import Shard
from axonn_ext.checkpoint.staging import Staging
from axonn_ext.checkpoint.storage import read_shards, write_file
from axonn_ext.optim import AdamW
from axonn_ext.spec.buckets import cuts_of
from grids import grid_of as grid_here
from model_cases import LLAMA

SHAPE = ROWS, COLUMNS = 2048, 256
PADDING = 37
KINDS = {
    "expand": (("x", "z"), ("y",)), "contract": (("y", "z"), ("x",)), "bias": (("x",),),
    "norm": (("y",),), "number": (),
}  # fmt: skip


def plan(shape: GridShape, *, layers: int = 1) -> dict[str, Layout]:
    """A table that both end stages hold, and on each stage Linears, norms, and ZeRO's parts."""
    grid = grid_of(shape)
    ends = {"pipe": (0, shape.pipe - 1)} if shape.pipe > 1 else {}
    found = {
        "table": Layout(grid, (ROWS - PADDING, COLUMNS), KINDS["expand"], PADDING, ends),
        "rng": Layout((shape.size, 1, 1, 1, 1), (shape.size, 16), (("data",), ())),
    }
    for stage in range(shape.pipe):
        where = {"pipe": (stage,)} if shape.pipe > 1 else {}
        rank = next(r for r in range(shape.size) if coords(grid, r)["pipe"] == stage)
        for layer in range(layers):
            blocks = {
                f"{stage}.{layer}.{kind}": Layout(grid, SHAPE[: len(dims)], dims, where=where)
                for kind, dims in KINDS.items()
            }
            numels = [math.prod(layout.held(rank)[0][1]) for layout in blocks.values()]
            runs: dict[str, list] = {name: [] for name in blocks}
            for cuts, numel in cuts_of(numels, elements=1000, num_parts=shape.data):
                part = numel // shape.data
                for cut in cuts:
                    runs[[*runs][cut.number]].append((cut.start, cut.stop, cut.at, part))
            found |= blocks
            for name, layout in blocks.items():
                found[f"{name}.exp_avg"] = replace(layout, runs=tuple(runs[name]))
    return in_turn(found, dict.fromkeys(found, 4))


@pytest.mark.long
def test_2048_ranks_write_each_element_once() -> None:
    """Each rank decides by itself, only from a layout and its rank."""
    shape = GridShape(x=8, y=2, z=4, data=8, pipe=4)
    for name, layout in plan(shape).items():
        count = np.zeros(layout.shape, np.int32)
        files = {}
        for rank in range(shape.size):
            for block in layout.blocks_of(file_name(rank)):
                place = zip(block.offsets, block.sizes, strict=True)
                count[tuple(slice(o, o + n) for o, n in place)] += 1
                files[block.offsets] = block
        assert (count == 1).all(), name
        whole = layout.overlapping((0,) * len(layout.shape), layout.shape)
        assert {block.offsets: block for block in whole} == files, name


def test_replicas_write_about_as_much() -> None:
    shape = GridShape(x=8, y=2, z=4, data=8, pipe=4)
    written = [0] * shape.data
    for layout in plan(shape, layers=8).values():
        for data in range(shape.data):
            rank = data * shape.size // shape.data + 27
            blocks = layout.blocks_of(file_name(rank))
            written[data] += sum(math.prod(block.sizes) for block in blocks)
    assert max(written) < 1.2 * sum(written) / shape.data


def test_of_16384_ranks_those_that_hold_a_block_name_the_same_one() -> None:
    shape, draw = GridShape(x=8, y=4, z=8, data=16, pipe=4), random.Random(1)
    layouts = plan(shape)
    for name in ("2.0.expand", "0.0.norm", "3.0.number", "table", "1.0.contract.exp_avg"):
        layout = layouts[name]
        for rank in draw.sample(range(shape.size), 4):
            if not (held := layout.held(rank)):
                continue
            owners = {layout.owner(r) for r in range(shape.size) if layout.held(r) == held}
            assert owners == {layout.owner(rank)}
            (owner,) = owners
            assert layout.held(owner) == held
            assert [*layout.blocks_of(file_name(owner))], "it writes it"


@pytest.mark.parametrize("seed", range(10))
def test_blocks_are_counted_without_a_look_at_each(seed) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([1, 2]) for _ in range(5)]
    for name, layout in plan(GridShape(*sizes)).items():
        if name != "rng" and layout.shape:
            padding = draw.choice([0, 1, 37, 700, ROWS])
            shape = (layout.shape[0] + layout.padding - padding, *layout.shape[1:])
            layout = replace(layout, padding=padding, shape=shape)
        blocks = layout.overlapping((0,) * len(layout.shape), layout.shape)
        assert layout.num_blocks == len([*blocks]), (name, layout)


@pytest.mark.parametrize("seed", range(20))
def test_any_part_of_a_tensor_is_found_in_few_blocks(seed) -> None:
    shape, draw = GridShape(x=8, y=4, z=8, data=16, pipe=4), random.Random(seed)
    for name, layout in plan(shape).items():
        pairs = [sorted((draw.randint(0, n), draw.randint(0, n))) for n in layout.shape]
        offsets, sizes = [a for a, _ in pairs], [b - a for a, b in pairs]
        found = list(layout.overlapping(offsets, sizes))
        shared = [
            [min(o + n, b + m) - max(o, b) for o, n, b, m in zip(
                offsets, sizes, block.offsets, block.sizes, strict=True)]
            for block in found
        ]  # fmt: skip
        assert sum(math.prod(each) for each in shared) == math.prod(sizes), name
        assert all(n > 0 for each in shared for n in each), "no block is read in vain"
        for block in draw.sample(found, min(3, len(found))):
            assert block in layout.blocks_of(block.file)


# --- What is parsed, and what is staged -----------------------------------------------------------

opened: list[Path] = []


def note_opened(event: str, arguments: tuple) -> None:
    if event == "open" and str(arguments[0]).endswith(".json"):
        opened.append(Path(arguments[0]))


def write_synthetic(folder: Path, *, ranks: int, tensors: int) -> None:
    """Writes a checkpoint of ranks * tensors blocks, each with one row."""
    folder.mkdir()
    names = [f"model.{number}" for number in range(tensors)]
    layout = Layout((ranks, 1, 1, 1, 1), (ranks, 2), (("data",), ()))
    for rank in range(ranks):
        row = torch.full((1, 2), float(rank))
        blocks = {block_key(name, (rank, 0)): row for name in names}
        write_file(folder, file_name(rank), blocks, "token")
    stored = dict.fromkeys(names, StoredTensor("float32", layout))
    manifest = Manifest(stored, range(ranks), 0, token="token")
    (folder / MANIFEST).write_text(manifest.to_json())


def parsed_bytes(folder: Path, *, first: int, ranks: int) -> tuple[int, int]:
    """Reads the blocks of some ranks; returns the bytes of the opened indexes, and of their own."""
    manifest = read_manifest(folder)
    targets = {
        name: Shard(tensor.layout, {(first, 0): torch.zeros(ranks, 2)}, torch.float32)
        for name, tensor in manifest.tensors.items()
    }
    opened.clear()
    read_shards(folder, manifest, targets)
    found = [path for path in opened if path.parent == folder]
    want = torch.arange(first, first + ranks).float()[:, None].expand(-1, 2)
    assert all(torch.equal(shard.tensor, want) for shard in targets.values())
    own = sum(
        (folder / index_name(file_name(r))).stat().st_size for r in range(first, first + ranks)
    )
    return sum(path.stat().st_size for path in found), own


@pytest.mark.long
def test_of_200000_blocks_a_rank_parses_what_says_where_its_own_are(tmp_path) -> None:
    sys.addaudithook(note_opened)
    write_synthetic(tmp_path / "large", ranks=100, tensors=2000)
    for first, ranks in ((17, 1), (50, 10), (0, 50)):
        parsed, own = parsed_bytes(tmp_path / "large", first=first, ranks=ranks)
        assert parsed == own
    write_synthetic(tmp_path / "small", ranks=4, tensors=2000)
    sizes = [(tmp_path / name / MANIFEST).stat().st_size for name in ("large", "small")]
    assert sizes[0] < 1.1 * sizes[1], "the numbers in it have more digits, and no more"


def staged_bytes(shape: GridShape) -> tuple[int, int]:
    """The bytes that this rank copies, and those that it holds."""
    model = models.build(LLAMA, grid_here(shape), seed=0)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    snapshot = Staging().take(model=model, optimizer=optimizer, extra=None)
    held = sum(3 * p.nbytes for p in model.parameters())
    random_state = torch.get_rng_state().nbytes
    return sum(block.nbytes for block in snapshot.blocks.values()) - random_state, held


def test_of_8_replicas_each_stages_an_eighth(pool) -> None:
    staged, held = zip(*pool(8).run(staged_bytes, GridShape(data=8)), strict=True)
    assert len(set(held)) == 1
    steps = sum(staged) - held[0]
    assert 0 < steps < 1000, "together they stage all of it once, and a number for each parameter"
    assert max(staged) < 1.2 * held[0] / 8
    assert all(b < 1.5 * a for a, b in pairwise(sorted(staged)))
