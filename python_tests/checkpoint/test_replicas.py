"""One rank reads the blocks that several ranks hold, and sends them to the others."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_ext import GridShape, checkpoint
from axonn_ext.checkpoint import CheckpointError, files, manifest, reading, replicas, storage
from axonn_ext.checkpoint.files import MappedFile
from axonn_ext.checkpoint.layout import Layout, coords, file_name, grid_of
from axonn_ext.checkpoint.reading import read_manifest
from axonn_ext.checkpoint.state import model_shards, optimizer_shards
from axonn_ext.nn import Linear, RMSNorm
from axonn_ext.nn.sharded import sharded_parameters
from axonn_ext.optim import AdamW
from axonn_ext.spec.grid import AXES
from grids import grid_of as grid_here

SIZE, LAYERS, EXTENT = 128, 4, 1024


@dataclasses.dataclass(frozen=True)
class Setup:
    """shape: the grid; None: each rank has the whole model."""

    shape: GridShape | None
    dtype: torch.dtype = torch.float32
    optimizer: str = "ours"
    zero: int = 0


class Counted(MappedFile):
    """Counts the bytes that are read, which are the bytes whose checksums are verified."""

    num_bytes = 0

    def _is_damaged(self, extent: int) -> bool:
        if extent not in self._checked:
            Counted.num_bytes += min(EXTENT, len(self._data) - extent * EXTENT)
        return super()._is_damaged(extent)


@contextmanager
def counted() -> Iterator[None]:
    """Counts reads, and makes extents small, so that small tensors have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "EXTENT_BYTES", EXTENT)
        for module in (manifest, reading):
            patch.setattr(module, "EXTENT_BYTES", EXTENT)
        patch.setattr(storage, "MappedFile", Counted)
        yield


def make(setup: Setup, seed: int) -> tuple[nn.Module, Any]:
    """A model and an optimizer with random values, which depend only on the seed, not the grid."""
    generator = torch.Generator().manual_seed(seed)
    if setup.shape is None:
        model: nn.Module = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(LAYERS)))
        for p in model.to(setup.dtype).parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p)
    else:
        grid = grid_here(setup.shape)
        kwargs: dict[str, Any] = {"grid": grid, "dtype": setup.dtype}
        model, each = nn.ModuleDict(), LAYERS // setup.shape.pipe
        for layer in range(each * grid.coords["pipe"], each * (grid.coords["pipe"] + 1)):
            model[f"linear {layer}"] = Linear(SIZE, SIZE, role="expand", **kwargs)
            model[f"norm {layer}"] = RMSNorm(SIZE, **kwargs)
        for sharded in sharded_parameters(model):
            whole = torch.randn(sharded.spec.full_sizes, generator=generator)
            sharded.parameter.grad = sharded.block(whole).to(setup.dtype)
    for p in model.parameters():
        p.data.copy_(p.grad)
    if setup.optimizer == "ours":
        optimizer: Any = AdamW(model, lr=1e-2, zero=setup.zero)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if not setup.zero:  # make the moments nonzero
        optimizer.step()
    return model, optimizer


def own_state(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    shards = model_shards(model, optimizer) | optimizer_shards(model, optimizer)
    shards |= {f"low.{name}": s for name, s in model_shards(model, None).items()}
    return {
        f"{name}@{offsets}": tensor.clone()
        for name, shard in shards.items()
        for offsets, tensor in shard.blocks.items()
    }


def save_and_load(written: Setup, read: Setup, folder: Path) -> tuple[int, bool]:
    """Returns the bytes that this rank read, and whether it gets its original state back.

    After a load on another grid, the state is saved there, and loaded into the first model.
    """
    with counted():
        model, optimizer = make(written, 0)
        want = own_state(model, optimizer)
        checkpoint.save(folder, model=model, optimizer=optimizer)
        other, other_optimizer = make(read, 1)
        Counted.num_bytes = 0
        checkpoint.load(folder, model=other, optimizer=other_optimizer)
        num_bytes = Counted.num_bytes
        if read == written:
            model, optimizer = other, other_optimizer
        else:
            again = folder.with_name("again")
            checkpoint.save(again, model=other, optimizer=other_optimizer)
            checkpoint.load(again, model=model, optimizer=optimizer)
    got = own_state(model, optimizer)
    same = got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)
    return num_bytes, same


BF16, FP64 = torch.bfloat16, torch.float64
SAME = [
    Setup(GridShape(data=4)),
    Setup(GridShape(data=4), BF16, zero=1),
    Setup(GridShape(y=2, data=2), BF16),
    Setup(GridShape(x=2, z=2), FP64),
    Setup(GridShape(data=2, pipe=2)),
    Setup(None, FP64, "SGD"),
    Setup(None),
]


@pytest.mark.parametrize("setup", SAME, ids=str)
def test_ranks_read_a_checkpoint_once_in_all(pool, tmp_path, setup) -> None:
    num_bytes, same = zip(*pool(4).run(save_and_load, setup, setup, tmp_path / "one"), strict=True)
    assert all(same)
    for rank, own in enumerate(num_bytes):  # its own file without the header
        content = (tmp_path / "one" / file_name(rank)).read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        assert own == len(content) - header // EXTENT * EXTENT


PAIRS = [
    (Setup(GridShape(x=2, y=2), BF16), Setup(GridShape(data=4), BF16)),
    (Setup(GridShape(data=4), zero=1), Setup(GridShape(z=2, data=2))),
    (Setup(GridShape(z=4), FP64), Setup(GridShape(x=2, data=2), FP64)),
]


@pytest.mark.parametrize(("written", "read"), PAIRS, ids=str)
def test_another_grid_reads_it_about_once(pool, tmp_path, written, read) -> None:
    answers = pool(4).run(save_and_load, written, read, tmp_path / "one")
    num_bytes, same = zip(*answers, strict=True)
    assert all(same)
    with counted():
        stored = read_manifest(tmp_path / "one")
    # Extents at the ends of a block may be read by several ranks.
    ends = 2 * sum(tensor.layout.num_blocks for tensor in stored.tensors.values())
    assert sum(num_bytes) < stored.num_bytes + ends * EXTENT < 2 * stored.num_bytes
    assert max(num_bytes) < 0.5 * stored.num_bytes


# --- Errors ---------------------------------------------------------------------------------------


def load_in_turn(folder: Path, damage: Callable[[Path], object]) -> list[str]:
    """Loads with a damaged file that one rank reads, with differing ranks, and without error."""
    setup, rank, said = Setup(GridShape(data=4)), dist.get_rank(), []
    model, optimizer = make(setup, 0)
    for name in ("bad", "good"):
        checkpoint.save(folder / name, model=model, optimizer=optimizer)
    if rank == 0:
        damage(folder / "bad" / "rank-00002.safetensors")
    dist.barrier()
    for name, others in (("bad", True), ("good", False), ("good", True)):
        try:
            with_it = optimizer if others or rank != 3 else None
            checkpoint.load(folder / name, model=model, optimizer=with_it)
            said.append("loaded")
        except CheckpointError as error:
            said.append(str(error))
    return said


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(90_000)
        file.write(b"\xff\x00\xff")


@pytest.mark.parametrize(
    ("damage", "message"),
    [(Path.unlink, "cannot be read: No such file"), (overwrite, "is damaged: bytes 0 to ")],
)
def test_an_error_of_the_rank_that_reads_reaches_all(pool, tmp_path, damage, message) -> None:
    answers = pool(4).run(load_in_turn, tmp_path, damage)
    (said,) = {tuple(answer) for answer in answers}
    assert said[0].startswith(f"rank 2: {tmp_path / 'bad' / 'rank-00002.safetensors'}")
    assert message in said[0]
    assert said[1].startswith(
        "ranks 0 and 3 have different tensors: optimizer.linear 0.bias.exp_avg is"
    )
    assert said[2] == "loaded"


# --- Paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_all_ranks_that_hold_a_block_get_it_in_the_groups_of_a_grid(seed) -> None:
    draw = random.Random(seed)
    grid = grid_of(GridShape(*(draw.choice([1, 2, 3]) for _ in AXES)))
    size = dict(zip(AXES, grid, strict=True))
    where = {"pipe": tuple(sorted({0, size["pipe"] - 1} if draw.random() < 0.5 else {0}))}
    split = draw.sample(sorted(set(AXES) - {"pipe"}), draw.randint(0, 4))
    if "data" not in split and draw.random() < 0.3:
        where["data"] = (draw.randrange(size["data"]),)
    layout = Layout(grid, (36 * 36,), (tuple(split),), where=where, turn=draw.randrange(99))
    ranks = [r for r in range(layout.num_ranks) if coords(grid, r)["pipe"] in where["pipe"]]
    steps: dict[Any, dict[int, int]] = defaultdict(dict)
    for rank in ranks:
        for axis, source in layout.path(rank):
            group = tuple(n for a, n in coords(grid, rank).items() if a != axis)
            steps[axis, group][rank] = source
    have = {layout.owner(rank) for rank in ranks}
    for axis in AXES:
        for (its_axis, group), members in steps.items():
            if its_axis == axis:
                places = where["pipe"] if axis == "pipe" else range(size[axis])
                assert [*members] == [
                    r for r in ranks
                    if tuple(n for a, n in coords(grid, r).items() if a != axis) == group
                ]  # fmt: skip
                (source,) = {*members.values()}
                (first,) = [r for r in members if coords(grid, r)[axis] == places[source]]
                assert first in have and not have & (members.keys() - {first}), "and no others"
                have |= members.keys()
    assert have == {*ranks}


def copy_in_parts() -> bool:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    wide = torch.randn(40, 33, dtype=torch.float64)
    before, column = wide.clone(), wide[:, 7:29]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_PART_BYTES", 1000)
        replicas._broadcast(column, dist.group.WORLD, 1)
    torch.manual_seed(1)
    before[:, 7:29] = torch.randn(40, 33, dtype=torch.float64)[:, 7:29]
    return torch.equal(wide, before)


def test_a_part_of_a_matrix_is_copied_in_parts(pool) -> None:
    assert all(pool(2).run(copy_in_parts))
