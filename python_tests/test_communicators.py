"""Communicators of our own: what ranks agree on before they are made, and what is refused.

The numbering, the comparison and the watching of calls are tested in
cpp_tests/ranks/call_log_test.cpp, what they compute in gpu/test_gpu_communicators.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from axonn_ext import GridShape
from axonn_ext.ranks.communicators import Communicators, why_none
from fake_communicators import FakeLibrary
from grids import grid_of

GPU = torch.device("cuda", 0)
AXES = {"z": [0, 1], "data": [0, 2]}


def test_a_grid_has_its_axes(pool):
    for rank, axes in enumerate(pool(4).run(axes_of_a_grid)):
        first, column = rank - rank % 2, rank % 2
        assert axes == {"x": [first, first + 1], "data": [column, column + 2]}


def axes_of_a_grid() -> dict[str, list[int]]:
    return grid_of(GridShape(x=2, data=2)).communicators._axes


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        (torch.device("cpu"), {}, "device must be a GPU with its index, such as cuda:0, got cpu"),
        (torch.device("cuda"), {}, "such as cuda:0, got cuda"),
        (GPU, {"max_ctas": -1}, "max_ctas must be >= 0, got -1"),
    ],
)
def test_bad_arguments(device: torch.device, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Communicators(AXES, library=FakeLibrary()).get(device, **options)


def test_a_grid_of_one_rank_needs_none() -> None:
    library = FakeLibrary()
    assert Communicators({}, library=library).get(GPU, required=True) is None
    assert library.made == []


@pytest.mark.parametrize(
    ("nccl", "why"),
    [("2.18.1", ""), ("3.0", ""), ("2.17.9", "NCCL 2.17.9 is loaded, and 2.18 is the oldest"),
     ("", "NCCL of unknown version is loaded")],
)  # fmt: skip
def test_an_old_nccl_is_none(nccl: str, why: str) -> None:
    said = why_none(FakeLibrary(nccl))
    assert said.startswith(why) if why else said == ""


# --- What is made --------------------------------------------------------------------------------


def ask(libraries: list[FakeLibrary | None], asks: list[dict[str, Any]]) -> tuple[Any, list[Any]]:
    """What this rank gets, or hears; and what its library has made."""
    library = libraries[dist.get_rank()]
    communicators = Communicators(AXES, library=library)
    try:
        got: Any = communicators.get(GPU, **asks[dist.get_rank()])
    except RuntimeError as error:
        got = str(error)
    return got if isinstance(got, str) else got is not None, library.made if library else []


NEW, OLD = FakeLibrary(), FakeLibrary("2.16.2")


@pytest.mark.parametrize("max_ctas", [0, 6])
@pytest.mark.parametrize("required", [False, True])
def test_made_alike_on_all_ranks(pool, required, max_ctas):
    asks = [{"required": required, "max_ctas": max_ctas}] * 4
    for got, made in pool(4).run(ask, [NEW] * 4, asks):
        assert got is True
        ((_, axes, options),) = made
        assert axes == list(AXES.items())
        assert options["device"] == 0 and options["max_ctas"] == max_ctas
        assert options["timeout_seconds"] > 0 and options["compare_calls"] is False


@pytest.mark.parametrize("missing", [{2: OLD}, {1: None}, {0: None, 3: OLD}])
def test_one_rank_that_cannot_decides_for_all(pool, missing):
    libraries = [missing.get(rank, NEW) for rank in range(4)]
    assert pool(4).run(ask, libraries, [{}] * 4) == [(False, [])] * 4
    for got, made in pool(4).run(ask, libraries, [{"required": True}] * 4):
        assert "requested, but are not available" in got and made == []
        for rank, library in missing.items():
            why = "no CUDA parts" if library is None else "NCCL 2.16.2 is loaded"
            assert f"rank {rank}: " in got and why in got


def test_ranks_that_ask_for_different_ones(pool):
    asks = [{"max_ctas": 4 if rank == 2 else 8} for rank in range(4)]
    for got, made in pool(4).run(ask, [NEW] * 4, asks):
        assert "max_ctas=8 on ranks 0, 1, 3; max_ctas=4 on rank 2" in got and made == []


def ask_in_vain() -> list[str]:
    """What those hear who ask again and must have what could not be made."""
    communicators = Communicators(AXES, library=None)
    heard = []
    assert communicators.get(GPU) is None
    for _ in range(2):
        with pytest.raises(RuntimeError, match="are not available") as error:
            communicators.get(GPU, required=True)
        heard.append(str(error.value))
    communicators.close()
    return heard


def test_what_cannot_be_made_is_an_error_each_time(pool):
    for first, second in pool(2).run(ask_in_vain):
        assert first == second and "ranks 0, 1: this build of axonn_ext has no CUDA parts" in first


def ask_often() -> tuple[int, int, int]:
    """How many were made; closed; and made again."""
    library = FakeLibrary()
    communicators = Communicators(AXES, library=library)
    for options in ({}, {"max_ctas": 2}, {"required": True}, {"max_ctas": 2}):
        assert communicators.get(GPU, **options) is library
    made = len(library.made)
    communicators.close()
    communicators.close()
    communicators.get(GPU)
    return made, library.closed, len(library.made)


def test_made_once_and_kept(pool):
    assert pool(4).run(ask_often) == [(2, 2, 3)] * 4
