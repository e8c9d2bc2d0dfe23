"""Sizes of axes that are fixed, bounded or excluded."""

from __future__ import annotations

import dataclasses
import random

import pytest

from axonn_ext.planner import PlannerError, Request, load_machine, plan
from axonn_ext.planner.search.axes import AxisRules
from axonn_ext.planner.search.choices import jobs_of
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.grid import COMMUNICATING, GridShape, grids_of
from axonn_ext.spec.model import ModelConfig

MODEL = ModelConfig(512, 256, 4, 8, 128)
NODE = 4  # ranks per node of perlmutter


def request_of(text: str, **changes: object) -> Request:
    axes = AxisRules.parse(text)
    request = Request(MODEL, "small", 16, load_machine("perlmutter"), 64, axes=axes, top=1000)
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


def by_hand(item: str, grid: GridShape) -> bool:
    """Whether a grid meets one condition, computed independently of the module."""
    axis, _, size = item.partition("=")
    own = getattr(grid, axis)
    if size == "*":
        return True
    if size == "node":  # check the ranks of every group
        step = grid.inner(axis)
        groups = [
            [first + step * i for i in range(own)]
            for first in range(grid.size)
            if first // step % own == 0
        ]
        return all(len({rank // NODE for rank in group}) == 1 for group in groups)
    if size.startswith("!"):
        return own != int(size[1:])
    low, _, high = size.partition("..")
    return int(low) <= own <= int(high or low)


@pytest.mark.parametrize("seed", range(20))
def test_a_search_has_the_grids_that_meet_all_conditions_and_no_others(seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.choice([8, 12, 16, 24, 64])
    sizes = ["*", "node", "!2", "!4", "1", "2", "1..2", "2..16", "2..3"]
    items = [
        f"{chance.choice(COMMUNICATING[:4])}={chance.choice(sizes)}"
        for _ in range(chance.randint(1, 3))
    ]
    request = request_of(",".join(items), num_ranks=ranks)
    found = {job.grid for job in jobs_of(request)}
    assert found == {g for g in grids_of(ranks) if all(by_hand(item, g) for item in items)}
    assert str(request.axes) == ",".join(items)


def test_the_best_of_fewer_grids_is_the_best_of_them_in_a_search_of_all() -> None:
    of_all = plan(request_of("x=*", simulate=10_000)).configs
    for text in ("x=2", "y=2..4,data=!1", "z=!1,z=!2"):
        rules = AxisRules.parse(text)
        machine = load_machine("perlmutter")
        found = plan(request_of(text, simulate=10_000)).configs
        expected = [e for e in of_all if rules.allow(e.job.grid, machine)]
        assert [e.job.grid for e in found] == [e.job.grid for e in expected]
        assert 0 < len(found) < len(of_all)


def test_bounds_of_an_axis() -> None:
    rules = AxisRules.parse("pipe=2..8,pipe=!4,pipe=1..4,x=!2")
    assert (rules.most("pipe"), rules.most("x"), rules.most("y")) == (4, None, None)
    assert rules.names("x") and not rules.names("z")


def test_conditions_that_no_grid_meets_are_named() -> None:
    with pytest.raises(PlannerError, match=r"no grid of 16 GPUs of perlmutter .* has x=3"):
        plan(request_of("x=3"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "AXIS=SIZE"),
        ("x", "AXIS=SIZE"),
        ("w=2", "one of x, y, z, data, pipe"),
        ("x=0", "sizes >= 1"),
        ("x=!0", "sizes >= 1"),
        ("x=8..2", "A <= B, got 'x=8..2'"),
        ("x=-1", "got 'x=-1'"),
        ("x=!2..4", "got 'x=!2..4'"),
        ("x=2,", "got '' in 'x=2,'"),
        ("x=node2", "node"),
        ("x=" + "9" * 5000, "AXIS=SIZE"),
    ],
)
def test_mistakes(text: str, expected: str) -> None:
    with pytest.raises(InputError) as raised:
        AxisRules.parse(text)
    assert expected in str(raised.value)
    assert len(str(raised.value)) < 700
