"""Values that ranks exchange are sent as JSON, and never unpickled."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import axonn_ext
from axonn_ext.ranks.grid import Grid
from axonn_ext.ranks.rank_values import dtype_named, of_all_ranks, of_first_rank

PICKLES = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list", "pickle",
}  # fmt: skip


def tell(value: Any) -> list[Any]:
    return of_all_ranks([value, dist.get_rank(), dist.get_rank() * "long"])


def hear_the_first(value: Any) -> list[Any]:
    return of_first_rank([value, (1 + dist.get_rank()) * "long"])


def tell_along_x() -> list[Any]:
    grid = Grid(x=2, z=2)
    return of_all_ranks(dist.get_rank(), grid.group("x"))


@pytest.mark.parametrize("value", [None, "\udcff", {"a": [1, 2.5, True]}, "", float("inf")])
def test_every_rank_has_the_values_of_all(pool, value: Any) -> None:
    for found in pool(4).run(tell, value):
        assert found == [[value, rank, rank * "long"] for rank in range(4)]
    assert pool(4).run(hear_the_first, value) == 4 * [[value, "long"]]


def test_values_of_a_group(pool) -> None:
    assert pool(4).run(tell_along_x) == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_dtype_by_its_name(dtype: torch.dtype) -> None:
    assert dtype_named(str(dtype)) == dtype
    with pytest.raises(ValueError, match=r"expected a torch dtype, got 'torch\.load'"):
        dtype_named("torch.load")


def test_nothing_is_unpickled() -> None:
    found = []
    for path in Path(axonn_ext.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            is_load = isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"
            if name in PICKLES or is_load:
                found.append(f"{path}:{node.lineno}")
    assert not found
