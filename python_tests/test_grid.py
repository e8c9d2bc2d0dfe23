"""Grid: grammar, coordinates, blocks, groups, device mesh, errors."""

from __future__ import annotations

import gc
import os
import re
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from axonn_ext import Grid, GridShape, ops
from axonn_ext.checkpoint.ranks import Ranks
from axonn_ext.ranks.side_groups import SideGroups, destroy
from axonn_ext.spec import settings
from grids import factorisations, grid_of
from worker_pool import WorkerPool


@pytest.mark.parametrize(
    "text, shape",
    [
        ("x=2,y=3", GridShape(x=2, y=3)),
        (" z=4 , data=2", GridShape(z=4, data=2)),
        ("2x3x4", GridShape(x=2, y=3, z=4)),
        ("x=1", GridShape()),
    ],
)
def test_parse(text, shape):
    assert GridShape.parse(text) == shape
    assert GridShape.parse(str(shape)) == shape
    assert GridShape(**shape.as_dict()) == shape
    assert list(shape.as_dict()) == ["x", "y", "z", "data", "pipe"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("x=2,w=2", ["'w=2'", "x=2,y=2,z=1", "data, pipe"]),
        ("", ["x=2,y=2,z=1"]),
        ("2x2", ["'2x2'", "2x2x1"]),
        ("x=0", ["axis x", ">= 1", "0"]),
        ("y=-2", ["axis y", "-2"]),
        ("x=2,x=2", ["x appears twice"]),
        ("auto", ["auto", "planner"]),
    ],
)
def test_parse_refuses(text, words):
    with pytest.raises(ValueError) as error:
        GridShape.parse(text)
    assert all(word in str(error.value) for word in words), error.value


def test_needs_a_world():
    with pytest.raises(RuntimeError, match="init_process_group"):
        Grid()


def check_grid(shape: GridShape) -> tuple[int, ...]:
    grid = grid_of(shape)
    full = torch.arange(24 * 16).view(24, 16)
    for dims in ({0: ("data", "z", "x"), 1: ("y",)}, {1: ("x", "z")}, {0: ("y", "x")}, {}):
        local = grid.shard(full, dims)
        assert local.is_contiguous()
        assert torch.equal(grid.unshard(local, dims), full)
    for axis in ("data", "pipe", "z", "y", "x"):
        group = grid.group(axis)
        assert group.size() == grid.size(axis) == getattr(shape, axis)
        assert dist.get_group_rank(group, grid.rank) == grid.coords[axis]
    mesh = grid.device_mesh
    assert mesh.mesh_dim_names == ("data", "pipe", "z", "y", "x")
    assert list(mesh.get_coordinate()) == [grid.coords[a] for a in mesh.mesh_dim_names]
    assert mesh.get_group("x").group_name == grid.axis("x").name
    # x is the fastest axis: neighbours in rank are neighbours along it.
    c, s = grid.coords, shape
    assert grid.rank == ((c["data"] * s.z + c["z"]) * s.y + c["y"]) * s.x + c["x"]
    return tuple(c.values())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_blocks_groups_and_mesh(pool, world_size):
    for shape in factorisations(world_size):
        places = pool(world_size).run(check_grid, shape)
        assert len(set(places)) == world_size


def collect_errors() -> list[str]:
    grid = grid_of(GridShape(x=2))
    errors = []
    for function in (
        lambda: Grid(x=3),
        lambda: grid.shard(torch.ones(3, 4), {0: ("x",)}),
        lambda: grid.axis("w"),
    ):
        with pytest.raises(ValueError) as error:
            function()
        errors.append(str(error.value))
    return errors


def test_errors_name_the_numbers(pool):
    for size, shard, axis in pool(2).run(collect_errors):
        assert "x=3,y=1,z=1,data=1,pipe=1 has 3 ranks but the world has 2" in size
        assert "dim 0 of a tensor of shape [3, 4] must be divisible by 2 (axes x=2)" in shard
        assert "data, pipe, z, y, x" in axis and "'w'" in axis


class Late(NamedTuple):
    """What a rank finds where its peer does not come: the error, and the limit of a group."""

    error: str
    limit: float


def make_without_peer(what: str) -> Late:
    grid = Grid(x=2)
    backend = grid.group("x")._get_backend(torch.device("cpu"))
    limit = backend.options._timeout.total_seconds()
    if grid.rank == 1:
        dist.distributed_c10d._get_default_store().wait([f"given up/{what}"])
        return Late("", limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AXONN_TIMEOUT_SECONDS", "0.5")
        with pytest.raises(RuntimeError) as error:
            if what == "grid":
                Grid(x=2)
            elif what == "side group":
                grid.side_groups.get("tests")
            else:
                Ranks.of_world().agree(None)
    dist.distributed_c10d._get_default_store().set(f"given up/{what}", "")
    return Late(str(error.value), limit)


@pytest.mark.parametrize("what", ["grid", "side group", "checkpoint"])
def test_no_group_waits_longer_for_a_peer_than_it_is_told(what):
    """Torch's own limit is half an hour, which this test would not see the end of."""
    pool = WorkerPool(2)  # whose ranks are out of step afterwards
    try:
        first, second = pool.run(make_without_peer, what)
    finally:
        pool.close()
    assert re.search(r"no word of rank 1 (after|for) 0.5 s \(AXONN_TIMEOUT_SECONDS\)", first.error)
    assert first.limit == second.limit == settings.load().timeout_seconds + 30


# --- How grids end --------------------------------------------------------------------------------


def use_of_grids(count: int, closes: bool) -> list[tuple[int, int]]:
    """The open files and the threads after each grid, in which ranks have shared memory."""
    used, ones = [], torch.ones(2, 2)
    gc.freeze()  # what is there already is not looked at, which would take most of the time
    for _ in range(count):
        grid = Grid(x=2)
        grid.side_groups.get("test")
        assert ops.matmul_all_reduce(ones, ones, grid.group("x")).eq(4).all()
        if closes:
            grid.close()
        del grid
        gc.collect()
        used.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    gc.unfreeze()
    return used


@pytest.mark.parametrize("closes", [True, False])
def test_grids_that_end_leave_nothing(pool, closes: bool) -> None:
    for used in pool(2).run(use_of_grids, 20, closes):
        (files, threads), (last_files, last_threads) = used[1], used[-1]
        assert last_files < files + 10 and last_threads < threads + 10, used


def close_grids() -> None:
    with Grid(x=2) as grid:
        assert grid.size("x") == 2
    grid.close()
    for ask in (lambda: grid.axis("y"), lambda: grid.model_group, lambda: grid.neighbours("x", 1)):
        with pytest.raises(RuntimeError, match=r"Grid x=2.* is closed: make another one"):
            ask()
    with pytest.raises(RuntimeError, match=r"side group 'test': the grid is closed"):
        grid.side_groups.get("test")
    with pytest.raises(KeyError), Grid(x=2) as grid:
        raise KeyError
    assert grid.size("x") == 2


def test_a_closed_grid_says_so(pool) -> None:
    pool(2).run(close_grids)


def sum_along_axis() -> float:
    axis = Grid(x=2).axis("x")
    gc.collect()
    ones = torch.ones(1)
    dist.all_reduce(ones, group=axis.process_group)
    return ones.item()


def test_an_axis_keeps_the_groups_of_its_grid(pool) -> None:
    assert pool(2).run(sum_along_axis) == [2, 2]


def names_of_groups() -> list[str]:
    """Those of groups of the same ranks; some end while others are there."""
    first = dist.new_group(backend="gloo")
    side = SideGroups()
    names = [side.get("a").group_name]
    destroy(first)
    names.append(side.get("b").group_name)
    for _ in range(3):
        with Grid(x=2) as grid:
            names.append(grid.axis("x").name)
    dist.barrier(side.get("c"))
    return [*names, side.get("c").group_name]


def test_no_name_of_a_group_comes_again(pool) -> None:
    for names in pool(2).run(names_of_groups):
        assert len(set(names)) == 6
