"""The schedule of a step: its order, waits and times."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from axonn_ext.planner import Event, Job, Machine, Options, simulate, timeline
from axonn_ext.planner.job import violations
from axonn_ext.planner.search.closed_forms import ClosedForms
from axonn_ext.planner.simulation.costs import Costs
from axonn_ext.planner.simulation.events import Timeline
from axonn_ext.planner.simulation.linear_passes import SUM_OF_BLOCKS
from axonn_ext.planner.simulation.passes import Simulation
from axonn_ext.planner.simulation.simulate import prepare
from axonn_ext.planner.step.program import make_program
from axonn_ext.planner.step.tasks import Task
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import Overlap
from planner_machines import machine_of, seconds_of

MODEL = ModelConfig(512, 256, 12, 8, 128)
GRIDS = [GridShape(*sizes) for sizes in ((2, 2, 2, 2), (1, 1, 8, 2), (4, 1, 1, 4), (1, 4, 4, 1))]


def job_of(grid: GridShape, **options: object) -> Job:
    job = Job(MODEL, grid, Options(**options), 64)  # type: ignore[arg-type]
    assert not list(violations(job))
    return job


def jobs() -> list[Job]:
    return [
        job_of(grid, layout=layout, overlap=overlap, recompute=recompute, micro_batches=parts)
        for grid, layout, overlap, recompute, parts in itertools.product(
            GRIDS, ("sharded", "replicated"),
            (None, Overlap(), Overlap(prefetch=2, gathered_bytes=2 << 20, bucket_bytes=1 << 20)),
            ("none", "attention", "every:2", "every:3/4", "full"), (1, 4),
        )
        if not list(violations(Job(MODEL, grid, Options(layout=layout, micro_batches=parts), 64)))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def timelines() -> list[tuple[Job, Timeline]]:
    """Fully simulated steps of the jobs on one machine."""
    return [(job, timeline(job, machine_of())) for job in jobs()]


def in_sequence(job: Job) -> Job:
    """The job with the algorithm that runs everything in a Linear in sequence."""
    options = dataclasses.replace(job.options, algorithm="sequential")
    return dataclasses.replace(job, options=options)


def seconds_over_z(costs: Costs, task: Task) -> float:
    """The time of a task's collectives over z, wherever they run."""
    return sum(costs.collective(c) for c in (task.gather, task.scatter) if c is not None)


def seconds_on_path(job: Job, machine: Machine) -> float:
    """The time of a step that runs everything in sequence."""
    program, costs = make_program(job), Costs(machine, job.grid, job.options.dtype)
    total = costs.optimizer(program.optimizer.num_bytes)
    total += sum(costs.collective(c) for c in (*program.gradient_sums, *program.norm_sums))
    for tasks, repeats in program.micro_batch():
        for task in tasks:
            seconds = seconds_of(costs, task) + seconds_over_z(costs, task)
            total += repeats * program.num_micro_batches * seconds
    return total


def test_without_overlap_everything_follows_everything() -> None:
    machine = machine_of(hidden_share=0.0)
    for job in map(in_sequence, jobs()):
        if job.options.overlap is None:
            assert timeline(job, machine).step_time_s == pytest.approx(
                seconds_on_path(job, machine), rel=1e-9
            )


def test_a_step_is_computing_and_waiting() -> None:
    for job in jobs():
        result = timeline(job, machine_of(hidden_share=0.5))
        waiting = sum(result.exposed_s.values())
        assert result.step_time_s == pytest.approx(result.compute_s + waiting, rel=1e-9)


def test_streams_do_one_thing_at_a_time_in_order(timelines: list[tuple[Job, Timeline]]) -> None:
    for _, whole in timelines:
        ends: dict[str, float] = {}
        for event in whole.events:
            assert event.start_s >= ends.get(event.stream, 0.0) - 1e-12
            assert event.end_s >= event.start_s
            ends[event.stream] = event.end_s
        assert "compute" in ends


def test_the_events_are_the_program(timelines: list[tuple[Job, Timeline]]) -> None:
    """They are all products, and all collectives except gathers of weights that are still kept."""
    for job, whole in timelines:
        program, events = make_program(job), whole.events
        tasks = [
            task
            for part, repeats in program.micro_batch()
            for task in part * repeats * program.num_micro_batches
        ]
        computed = sum(e.stream == "compute" and not e.name.endswith(SUM_OF_BLOCKS) for e in events)
        assert computed == len(tasks) + 1 - sum(_is_free(task) for task in tasks)
        issued = sum(len(list(task.collectives())) for task in tasks)
        issued += len(program.gradient_sums) + len(program.norm_sums)
        communicated = sum(e.stream != "compute" for e in events)
        spared = issued - communicated
        if job.options.overlap is None:
            assert spared == 0
        else:  # spares gathers of kept weights, but each is gathered once, and all are summed
            gathers = [task.name for task in tasks if task.gather is not None]
            assert 0 <= spared <= len(gathers) - job.model.num_layers * 4 * (job.grid.z > 1)
            sums = sum(
                event.name.endswith("reduce_scatter") for event in events if event.stream == "z"
            )
            assert sums == sum(task.scatter is not None for task in tasks)


def _is_free(task: object) -> bool:
    return not (task.matmul or task.scores or task.touched_bytes)  # type: ignore[attr-defined]


def test_few_layers_and_micro_batches_tell_the_time_of_all(
    timelines: list[tuple[Job, Timeline]],
) -> None:
    """They differ by up to 2 %, as buckets are whole in one and scaled in the other."""
    others = machine_of(hidden_share=0.9), machine_of(inter=2e9)
    for number, (job, known) in enumerate(timelines):
        other = others[number // 2 % 2]
        for machine, whole in ((machine_of(), known), (other, timeline(job, other))):
            quick = simulate(job, machine)
            assert quick.step_time_s == pytest.approx(whole.step_time_s, rel=0.02), job
            assert quick.compute_s == pytest.approx(whole.compute_s, rel=1e-6)
            assert not quick.events


def test_steps_that_are_simulated_together_are_what_each_is_by_itself() -> None:
    machine = machine_of()
    overlaps = [Overlap(n, 1 << size, deferred=2) for n in (0, 1, 8) for size in (0, 18, 21, 30)]
    staged = [
        job_of(grid, layout=layout, overlap=overlap, micro_batches=8, recompute="every:2")
        for grid in (GridShape(2, 1, 4), GridShape(2, 1, 2, 2, pipe=2), GridShape(y=2, z=2, pipe=4))
        for layout in ("sharded", "replicated")
        for overlap in overlaps
    ]
    for job in (*jobs()[::11], *staged):
        for stage in range(job.grid.pipe):
            step = prepare(job, machine, stage=stage)
            simulation = Simulation(job, step, records=False)
            apart = [passes for n in (1, 2, 3) for passes in simulation.run_all_layers((n,))]
            assert simulation.run_all_layers((1, 2, 3)) == apart, (job, stage)


def test_more_sums_under_way_change_nothing_where_none_was_waited_for() -> None:
    """So a search need not simulate them."""
    rng, found = random.Random(3), set()
    for job in rng.sample([job for job in jobs() if job.options.overlap is not None], 60):
        for machine in (machine_of(), machine_of(inter=3e9, hidden_share=0.9)):
            steps = {}
            for deferred in (0, 2, 4, 8):
                overlap = dataclasses.replace(job.options.overlap, deferred=deferred)
                options = dataclasses.replace(job.options, overlap=overlap)
                steps[deferred] = simulate(dataclasses.replace(job, options=options), machine)
            for deferred, step in steps.items():
                others = [s for more, s in steps.items() if more > deferred]
                found.add((step.deferred_binds, all(s == step for s in others)))
    assert found == {(False, True), (True, False), (True, True)}


def test_closed_forms_are_the_schedule_where_nothing_overlaps(
    timelines: list[tuple[Job, Timeline]],
) -> None:
    """They differ by up to 3 %: closed forms omit the sums of biases and norms, and buckets'
    latencies."""
    machine = machine_of()
    for job, whole in timelines:
        if job.options.overlap is None:
            closed = ClosedForms(machine).seconds(job) + whole.optimizer_s
            assert closed == pytest.approx(whole.step_time_s, rel=0.03), job


def test_overlap_hides_and_never_costs() -> None:
    """In fp32, gradients are equally wide with and without overlap. Over z, far less is exposed."""
    for grid in GRIDS:
        for machine in (machine_of(), machine_of(inter=3e9)):
            beside = timeline(job_of(grid, dtype="fp32"), machine)
            after = timeline(job_of(grid, dtype="fp32", overlap=None), machine)
            digests = 3 * 1e-4
            assert beside.step_time_s <= after.step_time_s + digests
    z = GridShape(z=8, data=2)
    beside = timeline(job_of(z, dtype="fp32"), machine_of())
    after = timeline(job_of(z, dtype="fp32", overlap=None), machine_of())
    assert beside.exposed_s["z"] < 0.5 * after.exposed_s["z"]


def test_what_is_prefetched_is_ahead_of_the_sums_that_its_predecessor_leads_to() -> None:
    """This is the order of axonn_ext.overlap: the use of a weight starts the gather of the next
    one, before its products run and their sum over z can start."""
    largest = 2 * 4 * MODEL.hidden_size**2  # bytes of a weight of the MLP
    overlap = Overlap(prefetch=1, gathered_bytes=2 * largest)
    job = job_of(GridShape(z=8, data=2), overlap=overlap)
    events = [e for e in timeline(job, machine_of()).events if e.stream == "z"]
    issued = [e.name for e in sorted(events, key=lambda e: e.start_s)]
    first, second = "11.mlp.down wgrad: reduce_scatter", "11.mlp.up dgrad: all_gather"
    assert issued.index(second) < issued.index(first)
    assert issued.index(first) < issued.index("11.attention.out dgrad: all_gather")


def busy_together(events: list[Event], one: str, other: str) -> float:
    """Seconds in which both streams are busy."""
    return sum(
        max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s))
        for a in events if a.stream == one
        for b in events if b.stream == other
    )  # fmt: skip


def test_axes_that_send_over_the_same_links_share_them() -> None:
    """Nodes have 4 ranks: with x=2, only z leaves the node, and has the network to itself; with
    x=8, both leave. z's collectives then take longer by the time in which x sends."""
    for grid, shared in ((GridShape(x=2, z=8), False), (GridShape(x=8, z=4), True)):
        job, machine = job_of(grid, overlap=Overlap(gathered_bytes=0)), machine_of(inter=3e9)
        costs = Costs(machine, grid, "bf16")
        assert (costs.wires["x"] == costs.wires["z"]) == shared
        events = list(timeline(job, machine).events)
        alone = sum(
            seconds_over_z(costs, task) * repeats
            for tasks, repeats in make_program(job).micro_batch()
            for task in tasks
        )
        weights = [
            e
            for e in events
            if e.stream == "z" and e.name.endswith(("all_gather", "reduce_scatter"))
            and not e.name.startswith("order")
        ]  # fmt: skip
        lasts = sum(e.end_s - e.start_s for e in weights)
        at_the_end = ("gradients", "order", "grad norm")  # when z is idle, or nearly so
        x = [e for e in events if e.stream == "x" and not e.name.startswith(at_the_end)]
        together = busy_together([*weights, *x], "x", "z")
        assert together > 0
        assert lasts - alone == pytest.approx(together if shared else 0.0, abs=1e-9)


def data_sums(job: Job, machine: Machine) -> tuple[list[Event], float, float]:
    """The sums of buckets over data, the end of backward's computation, and that of z's sums."""
    events = timeline(job, machine).events
    sums = [e for e in events if e.stream == "data" and e.name.startswith("gradients")]
    computed = [e.end_s for e in events if e.stream == "compute" and e.name != "optimizer"]
    crossed = [e.end_s for e in events if e.stream == "z" and "wgrad" in e.name]
    return sums, max(computed), max(crossed, default=0.0)


def test_a_bucket_crosses_data_once_all_of_its_gradients_are_there() -> None:
    """This is when BucketedSums starts it. A bucket that is never full waits for the end of
    backward, and a gradient enters a bucket only after its sum over z. So few buckets hide little.
    """
    for grid in (GridShape(data=4, x=4), GridShape(z=8, data=2)):
        for slow in (2e10, 1e9):
            machine = machine_of(inter=slow)
            (one,), computed, crossed = data_sums(
                job_of(grid, overlap=Overlap(bucket_bytes=1 << 30)), machine
            )
            assert one.start_s >= max(computed, crossed) - 1e-9
            several, computed, crossed = data_sums(
                job_of(grid, overlap=Overlap(bucket_bytes=1 << 19)), machine
            )
            assert len(several) > 3
            assert several[0].start_s < one.start_s
            assert several[-1].start_s >= max(computed, crossed) - 1e-9


@pytest.mark.parametrize("gathered_bytes", [0, 4 << 20])
def test_prefetching_nothing_hides_no_gather(gathered_bytes: int) -> None:
    """This holds even with room for the next weights."""
    overlap = Overlap(prefetch=0, gathered_bytes=gathered_bytes)
    job = job_of(GridShape(z=8, data=2), overlap=overlap)
    events = timeline(job, machine_of()).events
    computing = [(e.start_s, e.end_s) for e in events if e.stream == "compute"]
    for gather in (e for e in events if e.name.endswith("all_gather") and e.stream == "z"):
        assert not any(start < gather.start_s < end - 1e-12 for start, end in computing)


def test_a_hidden_share_shortens_what_is_fused_and_nothing_else() -> None:
    job = job_of(GridShape(4, 4), overlap=None, algorithm="fused")
    none, all_of_it = (timeline(job, machine_of(hidden_share=s)) for s in (0.0, 1.0))
    assert none.compute_s == all_of_it.compute_s
    costs, hidden = Costs(machine_of(), job.grid, "bf16"), 0.0
    for tasks, repeats in make_program(job).micro_batch():
        for task in tasks:
            compute = costs.compute(task)
            if task.matmul is not None:
                hidden += repeats * min(compute, seconds_of(costs, task) - compute)
    assert hidden > 0
    assert none.step_time_s - all_of_it.step_time_s == pytest.approx(hidden, rel=1e-9)


def test_more_bandwidth_is_never_slower() -> None:
    rng = random.Random(0)
    for job in rng.sample(jobs(), 20):
        times = [timeline(job, machine_of(inter=b)).step_time_s for b in (1e9, 1e10, 1e11)]
        assert times == sorted(times, reverse=True)
