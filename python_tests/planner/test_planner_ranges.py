"""The range of a prediction, and the memory of communicators."""

from __future__ import annotations

from dataclasses import replace

import pytest

from axonn_ext.cli.plan.report import memory_warning
from axonn_ext.planner import Machine, Request, load_machine, plan
from axonn_ext.planner.estimate import estimate
from axonn_ext.planner.job import Job, Options
from axonn_ext.planner.machines.links import Links
from axonn_ext.planner.machines.machine import machine_names
from axonn_ext.planner.memory.peak import memory_of
from axonn_ext.planner.simulation.simulate import simulate
from axonn_ext.planner.uncertainty import step_range
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import Overlap
from axonn_ext.spec.presets import PRESETS
from planner_machines import machine_of

SMALL = ModelConfig(1024, 512, 8, 8, 512)


def job_of(grid: GridShape, *, overlap: Overlap | None = None, batch: int = 64) -> Job:
    return Job(SMALL, grid, Options(overlap=overlap), batch)


def with_cluster(machine: Machine, **known: object) -> Machine:
    node, cluster = machine.links.levels
    return replace(machine, links=Links((node, replace(cluster, **known))))  # type: ignore[arg-type]


def test_a_machine_that_knows_everything_has_no_range() -> None:
    job, machine = job_of(GridShape(x=2, data=8)), machine_of()
    least, most, reasons = step_range(job, machine)
    assert least == most == pytest.approx(simulate(job, machine).step_time_s)
    assert reasons == ()


@pytest.mark.parametrize(
    ("grid", "shares"),
    # data's neighbours are 4, 4, 2 and 1 apart; that many groups leave a node of 4 together
    [(GridShape(x=4, data=4), True), (GridShape(y=4, z=2, data=2), True),
     (GridShape(x=2, data=8), False), (GridShape(data=16), False), (GridShape(x=4), False)],
)  # fmt: skip
def test_more_groups_than_were_measured_may_be_faster(grid: GridShape, shares: bool) -> None:
    machine = with_cluster(machine_of(inter=1e9), neighbours_measured=2, unmeasured_rate=2.0)
    job = job_of(grid)
    now = simulate(job, machine).step_time_s
    least, most, reasons = step_range(job, machine)
    assert most == pytest.approx(now)
    if shares:
        twice = simulate(job, machine_of(inter=2e9)).step_time_s
        assert least == pytest.approx(twice) and twice < 0.95 * now
        assert reasons == ("4 groups share the links of cluster, at most 2 measured",)
    else:
        assert least == pytest.approx(now) and reasons == ()


def test_large_jobs_may_have_less_of_the_network() -> None:
    machine = with_cluster(machine_of(inter=1e9), full_rate_ranks=8, least_rate=0.5)
    large, small = job_of(GridShape(x=4, data=4)), job_of(GridShape(x=4, data=2))
    assert step_range(small, machine).reasons == ()
    least, most, reasons = step_range(large, machine)
    assert least == pytest.approx(simulate(large, machine).step_time_s)
    assert most == pytest.approx(simulate(large, machine_of(inter=5e8)).step_time_s)
    assert most > 1.05 * least and reasons == ("cluster has 50% of its rate beyond 8 ranks",)


def test_stragglers_matter_on_several_nodes() -> None:
    machine = replace(machine_of(), straggler_share=0.1)
    assert step_range(job_of(GridShape(x=4)), machine).reasons == ()
    job = job_of(GridShape(x=4, data=2))
    slower = replace(machine, slowdown=1.1)
    assert step_range(job, machine).most_s == pytest.approx(simulate(job, slower).step_time_s)


def test_collectives_beside_computation_take_units_of_it() -> None:
    products = replace(machine_of().products, num_units=8)
    machine = replace(machine_of(inter=1e7), products=products, communication_units=2)
    alone = job_of(GridShape(data=8))  # without overlap, nothing runs concurrently
    assert step_range(alone, machine).reasons == ()
    job = job_of(GridShape(data=8), overlap=Overlap())  # slow, so always concurrent
    slower = replace(machine, slowdown=8 / 6)
    found = step_range(job, machine)
    assert found.reasons == ("collectives take 25% of the units for 100% of the computation",)
    assert found.most_s == pytest.approx(simulate(job, slower).step_time_s)


@pytest.mark.parametrize("name", machine_names())
def test_ranges_hold_the_prediction(name: str) -> None:
    machine = load_machine(name)
    dtype = next(dtype for dtype in ("bf16", "fp16", "fp32") if dtype in machine.peak_flops)
    if machine.device == "cpu":
        dtype = "fp32"
    for grid in (GridShape(x=8, z=16, data=16), GridShape(x=2, y=2, z=8, data=2),
                 GridShape(z=2, data=2, pipe=2)):  # fmt: skip
        options = Options(dtype=dtype, micro_batches=2, layout="replicated")
        job = Job(PRESETS["gpt-5b"], grid, options, 4096)
        seconds = estimate(job, machine, memory_of(job)).step_time_s
        least, most, _ = step_range(job, machine)
        assert least <= seconds * 1.0001 and seconds <= most * 1.0001
        assert most < 4 * least


@pytest.mark.parametrize(
    ("grid", "overlap", "count"),
    # those of the grid; of overlap, split from one of all ranks; of the edges of a pipeline
    [(GridShape(), Overlap(), 0), (GridShape(x=2), Overlap(), 1 + 2), (GridShape(x=2), None, 1),
     (GridShape(x=2, data=2), Overlap(), 2 + 3), (GridShape(x=2, z=2), Overlap(), 3 + 3),
     (GridShape(x=2, z=2), Overlap(communicators="c10d"), 3), (GridShape(pipe=2), Overlap(), 1 + 2),
     (GridShape(2, 2, 2, 2), Overlap(), 5 + 5), (GridShape(pipe=4), Overlap(), 1 + 4),
     (GridShape(2, 2, 2, 2, 4), Overlap(), 6 + 5 + 4)],
)  # fmt: skip
def test_communicators_have_buffers(grid: GridShape, overlap: Overlap | None, count: int) -> None:
    machine = replace(machine_of(memory=10**11), communicator_bytes=10**9)
    options = Options(overlap=overlap)
    request = Request(SMALL, "small", num_ranks=1, machine=machine, batch_size=8)
    assert request.memory_limit_on(grid, options) == int((10**11 - count * 10**9) * 0.95)


def test_what_fits_has_room_for_communicators() -> None:
    """With buffers of half the memory, a request rejects configurations that filled the rest."""
    machine = machine_of(memory=300_000_000)
    request = Request(SMALL, "small", num_ranks=4, machine=machine, batch_size=64)
    large = replace(request, machine=replace(machine, communicator_bytes=50_000_000))
    before, after = plan(request), plan(large)
    assert after.fits < before.fits
    for best in after.configs:
        buffers = large.machine.communicators_bytes(best.job.grid, best.job.options)
        assert best.memory.total + buffers <= 300_000_000
        assert best.memory_share == pytest.approx((best.memory.total + buffers) / 300_000_000)


def test_nearly_full_memory_is_warned_of() -> None:
    machine = machine_of(memory=300_000_000)
    request = Request(SMALL, "small", num_ranks=4, machine=machine, batch_size=64)
    configs = plan(request).configs
    full, empty = (replace(configs[0], memory_share=share) for share in (0.91, 0.9))
    assert memory_warning([empty]) == []
    assert "number 2: more than 90% of a GPU's memory" in memory_warning([empty, full, empty])[1]
