"""The overlap options that a plan finds fit, and none of the candidates is faster."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from axonn_ext.planner import (
    Estimate,
    Job,
    Options,
    PlannerError,
    Request,
    load_machine,
    memory_of,
    plan,
    simulate,
)
from axonn_ext.planner.estimate import estimate
from axonn_ext.planner.search.overlaps import (
    DEFERRED,
    PREFETCHES,
    fastest_overlap,
    with_least_numbers,
    with_most_held,
)
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.model_files import load_model
from axonn_ext.spec.parallel import Overlap
from planner_machines import machine_of

MIB = 1 << 20
# 24 MiB of weights per block, so that all blocks have 3 times the trainer's default budget.
MODEL = ModelConfig(8192, 4096, 16, 32, 1024)


def request_of(**changes: object) -> Request:
    """A request for a network so slow that gathers over z take longer than products."""
    machine = machine_of(inter=1e9, memory=40 << 30)
    machine = dataclasses.replace(machine, communicator_bytes=1 << 30)
    request = Request(MODEL, "wide", 16, machine, 64, micro_batches=(1,))
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


def job_of(**overlap: int) -> Job:
    return Job(MODEL, GridShape(z=8, data=2), Options(overlap=Overlap(**overlap)), 64)


def predict_on(request: Request, job: Job) -> Estimate:
    return estimate(job, request.machine, memory_of(job))


def test_a_plan_finds_numbers_that_are_faster_than_the_defaults() -> None:
    """Where z is the bottleneck. `before` is the plan without a search for overlap options."""
    request = request_of(layouts=("sharded",), fixed={"overlap": "on"}, top=99, simulate=10_000)
    given = dataclasses.replace(request, fixed={"overlap": Overlap()})
    before = {c.job.grid: c for c in plan(given).configs}
    after = {c.job.grid: c for c in plan(request).configs}
    assert set(before) == set(after)
    for grid, found in after.items():
        assert found.step_time_s <= before[grid].step_time_s * 1.001, grid
        assert found.memory.total <= request.memory_limit_on(grid, found.job.options)
    z = GridShape(z=16)
    assert after[z].step_time_s < 0.8 * before[z].step_time_s
    chosen = after[z].job.options.overlap
    assert chosen is not None and chosen.gathered_bytes > Overlap.gathered_bytes


@pytest.mark.parametrize("room", [0, 300 * MIB, 1 << 30, 3 << 30, 20 << 30])
def test_none_of_the_numbers_that_fit_is_faster(room: int) -> None:
    """The plan may give up 0.1 % for less memory."""
    least = memory_of(job_of()).total
    machine = machine_of(inter=1e9, memory=least + room)
    request = request_of(machine=machine, memory_fraction=1.0)

    def predict(job: Job) -> Estimate:
        return predict_on(request, job)

    found = fastest_overlap(request, job_of(), predict, worth=math.inf)
    simple = with_least_numbers(request, found, predict)
    assert found.memory.total <= request.memory_limit
    assert simple.memory.total <= min(found.memory.total, request.memory_limit)
    assert simple.step_time_s <= found.step_time_s * 1.0031
    budgets = range(1 << 30, (9 << 30) + 1, 256 * MIB)
    for prefetch, deferred, budget in itertools.product(PREFETCHES, DEFERRED, budgets):
        other = job_of(prefetch=prefetch, deferred=deferred, gathered_bytes=budget)
        if memory_of(other).total <= request.memory_limit:
            step_s = simulate(other, machine).step_time_s
            assert found.step_time_s <= step_s * 1.002, (prefetch, deferred, budget)


def test_the_largest_budget_that_fits_is_found() -> None:
    least = memory_of(job_of()).total
    for room in (0, 10 * MIB, 777 * MIB, 5 << 30, 50 << 30):
        request = request_of(machine=machine_of(memory=least + room), memory_fraction=1.0)
        job = with_most_held(request, job_of())
        assert memory_of(job).total <= request.memory_limit
        assert job.options.overlap is not None
        more = job_of(gathered_bytes=job.options.overlap.gathered_bytes + 2 * MIB)
        holds_all = memory_of(more).total == memory_of(job).total
        assert holds_all or memory_of(more).total > request.memory_limit


def test_numbers_that_are_given_are_not_searched() -> None:
    given = Overlap(prefetch=3, gathered_bytes=1 << 29, deferred=5)
    for config in plan(request_of(fixed={"overlap": given})).configs:
        assert config.job.options.overlap in (given, None)
    with pytest.raises(PlannerError, match="overlap must be None, an Overlap or 'on', got 'off'"):
        request_of(fixed={"overlap": "off"})
    grids = plan(request_of(fixed={"overlap": "on"})).configs
    assert all(config.job.options.overlap is not None for config in grids)


def test_a_large_model_holds_its_weights_rather_than_gathers_them_three_times() -> None:
    """A reported case: with the defaults, z took 25.8 % of the step."""
    name, model = load_model("llama3-405b")
    request = Request(
        model, name, num_ranks=16384, machine=load_machine("dgx-h100"), batch_size=2048,
        layouts=("sharded",), micro_batches=(1,), top=1,
    )  # fmt: skip
    found = plan(request).configs[0]
    fixed = plan(dataclasses.replace(request, fixed={"overlap": Overlap()})).configs[0]
    assert found.step_time_s < 0.85 * fixed.step_time_s
    assert found.exposed_s["z"] < 0.05 * found.step_time_s
