"""ZeRO and offload in the planner: the time of a step, errors, and options that would fit."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path

import pytest

from axonn_ext.planner import Job, Machine, Options, PlannerError, Request, plan, simulate, timeline
from axonn_ext.planner.job import ZERO_2_IN_STAGES, violations
from axonn_ext.planner.memory.peak import memory_of
from axonn_ext.planner.search.axes import AxisRules
from axonn_ext.planner.search.choices import fitting_with_some, jobs_of, variants_of
from axonn_ext.planner.search.optimizers import (
    optimizers_of,
    options_with,
    that_differ_on,
    tried_offloads,
    with_optimizer,
)
from axonn_ext.planner.simulation.costs import Costs
from axonn_ext.planner.simulation.updates import optimizer_step
from axonn_ext.planner.step.program import make_program
from axonn_ext.planner.step.tasks import Collective, OptimizerWork, Update
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.model_files import load_optimizer
from axonn_ext.spec.optimizer import OptimizerOptions
from axonn_ext.spec.parallel import Overlap
from planner_machines import machine_of, seconds_of

MODEL = ModelConfig(512, 256, 12, 8, 128)
DATA_4 = GridShape(data=4)


def with_host(*, link: float = 1e9, memory: float = 1e9, **options: object) -> Machine:
    machine = machine_of(**options)  # type: ignore[arg-type]
    return dataclasses.replace(machine, host_link_bytes_per_s=link, host_memory_bytes_per_s=memory)


def job_of(grid: GridShape, zero: int, offload: str = "none", **options: object) -> Job:
    chosen = Options(optimizer=OptimizerOptions(zero, offload, 400_000), **options)  # type: ignore[arg-type]
    job = Job(MODEL, grid, chosen, 64)
    assert not list(violations(job))
    return job


def costs_of(machine: Machine) -> Costs:
    return Costs(machine, DATA_4, "bf16")


GATHER = Collective("data", "all_gather", 3 * 10**6, "parameters")


@pytest.mark.parametrize("count", [1, 2, 3, 10])
@pytest.mark.parametrize(("crossing", "host"), [(10**6, 10**7), (10**7, 10**6)])
def test_offload_is_the_longer_one_and_the_ends_of_the_pipeline(
    crossing: int, host: int, count: int
) -> None:
    """The first gradients cross before everything else, and the last values return at the end."""
    costs = costs_of(with_host())
    updates = (Update(0, host, crossing, None),) * count
    step = optimizer_step(OptimizerWork(0, updates), costs, overlaps=True)
    c, u = crossing / 1e9, host / 1e9
    assert step.seconds == pytest.approx((count - 1) * max(c, u) + c + u + c)
    assert step.gathers == () and step.update_s == step.seconds


@pytest.mark.parametrize("count", [1, 2, 3, 10])
def test_a_gather_runs_beside_the_update_after_the_next_one(count: int) -> None:
    """This is how the code issues them: bucket i is sent after the update of bucket i + 1."""
    costs = costs_of(machine_of())
    updates = (Update(10**9, 0, 0, GATHER),) * count
    u, g = (
        f(updates[0]) for f in (lambda x: costs.update(x).device, lambda x: costs.update(x).gather)
    )
    blocking = optimizer_step(OptimizerWork(0, updates), costs, overlaps=False)
    assert blocking.seconds == pytest.approx(count * (u + g))
    step = optimizer_step(OptimizerWork(0, updates), costs, overlaps=True)
    assert g < u and step.update_s == pytest.approx(count * u)
    # When the last two are sent, no bucket is left to update.
    assert step.seconds == pytest.approx(count * u + min(count, 2) * g)
    assert len(step.gathers) == count


@pytest.mark.parametrize("overlap", [None, Overlap()])
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("offload", ["none", "cpu", "disk"])
def test_few_layers_and_micro_batches_tell_the_time_of_all(
    zero: int, offload: str, overlap: Overlap | None
) -> None:
    for grid in (GridShape(1, 1, 2, 4), GridShape(2, 1, 1, 8), GridShape(x=2)):
        for parts in (1, 4):
            for inter in (2e10, 1e9):
                job = job_of(grid, zero, offload, overlap=overlap, micro_batches=parts)
                machine = with_host(inter=inter)
                quick, whole = simulate(job, machine), timeline(job, machine)
                assert quick.step_time_s == pytest.approx(whole.step_time_s, rel=0.02), job
                waited = sum(whole.exposed_s.values())
                assert whole.step_time_s == pytest.approx(whole.compute_s + waited)
                assert max(e.end_s for e in whole.events) <= whole.step_time_s * (1 + 1e-9)


def test_without_overlap_everything_follows_everything() -> None:
    machine = machine_of()
    for zero in (1, 2):
        job = job_of(DATA_4, zero, overlap=None, micro_batches=4)
        program, costs = make_program(job), Costs(machine, job.grid, "bf16")
        total = costs.optimizer(program.optimizer.num_bytes)
        total += sum(costs.update(u).device for u in program.optimizer.updates)
        once = (*program.gradient_sums, *program.norm_sums, *program.optimizer.gathers)
        total += sum(map(costs.collective, once))
        total += 4 * sum(map(costs.collective, program.sums_in_each))
        assert bool(program.sums_in_each) == (zero == 2)
        for tasks, repeats in program.micro_batch():
            total += sum(4 * repeats * seconds_of(costs, task) for task in tasks)
        assert timeline(job, machine).step_time_s == pytest.approx(total, rel=1e-9)


def test_data_divides_the_time_of_adamw() -> None:
    """All parameters are also copied from gathered buckets, which data does not divide."""
    machine = machine_of()
    whole = simulate(job_of(GridShape(data=8), 0), machine).optimizer_s
    parts = simulate(job_of(GridShape(data=8), 1), machine).optimizer_s
    assert whole / 8 < parts < whole / 2


def test_more_sums_of_zero_2_take_more_time_on_slow_links() -> None:
    slow = machine_of(inter=1e9)
    times = [
        simulate(job_of(GridShape(data=8), zero, micro_batches=4), slow).step_time_s
        for zero in (1, 2)
    ]
    assert times[1] > 1.5 * times[0]


def test_offload_is_refused_where_the_host_is_not_known() -> None:
    message = "machine test has no host_link_bytes_per_s and no host_memory_bytes_per_s in its file"
    job = job_of(DATA_4, 1, "cpu")
    with pytest.raises(PlannerError, match=message):
        simulate(job, machine_of())
    half = dataclasses.replace(machine_of(), host_link_bytes_per_s=1e9)
    offloaded = OptimizerOptions(0, "disk")
    with pytest.raises(PlannerError, match="test has no host_memory_bytes_per_s in its file"):
        Request(MODEL, "small", 4, half, 64, optimizers=(OptimizerOptions(), offloaded))
    on_cpu = dataclasses.replace(machine_of(), device="cpu")
    request = Request(MODEL, "small", 4, on_cpu, 64, optimizers=(offloaded,))
    assert all(c.job.options.optimizer == offloaded for c in plan(request).configs)


def test_zero_2_is_refused_in_stages() -> None:
    options = Options(micro_batches=4, optimizer=OptimizerOptions(2))
    (broken,) = violations(Job(MODEL, GridShape(data=2, pipe=2), options, 64))
    assert broken == f"{ZERO_2_IN_STAGES}: stages need zero 0 or 1, got zero=2 and pipe=2"
    request = Request(
        MODEL, "small", 8, machine_of(), 64, max_pipe=2, optimizers=(OptimizerOptions(2),)
    )
    found = plan(request)
    assert found.rejected[ZERO_2_IN_STAGES] > 0
    assert all(config.job.grid.pipe == 1 for config in found.configs)


def test_what_is_asked_for_holds_for_all() -> None:
    for chosen in (OptimizerOptions(1), OptimizerOptions(2, "cpu")):
        request = Request(MODEL, "small", 16, with_host(), 64, optimizers=(chosen,), max_pipe=2)
        assert {c.job.options.optimizer for c in plan(request).configs} == {chosen}


ALL = optimizers_of(OptimizerOptions(), (0, 1), ("none", "cpu"))


@pytest.mark.parametrize("max_pipe", [1, 4])
def test_what_is_searched_is_as_fast_as_the_best_of_what_is_given(max_pipe: int) -> None:
    """This holds for less and less memory, and for fast and slow links to the host."""
    chosen = set()
    for megabytes, link in ((40, 1e9), (30, 1e11), (22, 1e9)):
        machine = with_host(link=link, memory=link)
        machine = dataclasses.replace(machine, memory_bytes=megabytes * 10**6)
        request = Request(
            MODEL, "small", 8, machine, 64, memory_fraction=1.0, max_pipe=max_pipe, optimizers=ALL,
            layouts=("sharded",), top=1, micro_batches=(1, 4, 16),
        )  # fmt: skip
        given = []
        for optimizer in ALL:
            with contextlib.suppress(PlannerError):  # may not fit
                given.append(plan(dataclasses.replace(request, optimizers=(optimizer,))).configs[0])
        found = plan(request).configs[0]
        chosen.add(found.job.options.optimizer)
        # Closed forms preselect the options, and differ from simulated steps by up to 1 %.
        assert found.step_time_s <= 1.01 * min(e.step_time_s for e in given), (megabytes, link)
    assert len(chosen) >= 2, chosen


def test_what_fits_with_some_options_is_what_is_counted() -> None:
    request = Request(MODEL, "small", 8, with_host(), 64, optimizers=ALL, memory_fraction=1.0)
    for job in jobs_of(request):
        if next(violations(job), None) is not None or job.options.micro_batches > 4:
            continue
        variants = variants_of(request, job)
        totals = {
            variant: [
                memory_of(with_optimizer(dataclasses.replace(job, options=variant), o)).total
                for o in that_differ_on(job.grid, ALL)
            ]
            for variant in variants
        }
        limit = sorted(min(of) for of in totals.values())[len(variants) // 2]
        tight = dataclasses.replace(
            request, machine=dataclasses.replace(request.machine, memory_bytes=limit)
        )
        found = fitting_with_some(tight, job, variants)
        expected = {v for v, of in totals.items() if min(of) <= limit}
        assert {options_with(f.options, OptimizerOptions()) for f in found} == expected
        for fitting in found:  # it has the first options that fit
            of = totals[options_with(fitting.options, OptimizerOptions())]
            first = next(i for i, total in enumerate(of) if total <= limit)
            assert fitting.options.optimizer == that_differ_on(job.grid, ALL)[first]


def test_only_options_that_differ_are_tried() -> None:
    none, zero, host, both = ALL
    assert that_differ_on(GridShape(data=2), ALL) == ALL
    assert that_differ_on(GridShape(z=2), ALL) == (none, host)
    assert that_differ_on(GridShape(z=2), (zero, both)) == (zero, both)
    two = OptimizerOptions(2)
    assert that_differ_on(GridShape(data=2, pipe=2), (two, zero)) == (zero,)
    assert that_differ_on(GridShape(data=2, pipe=2), (two,)) == (two,)
    assert tried_offloads(with_host()) == ("none", "cpu")
    assert tried_offloads(machine_of()) == ("none",)
    assert tried_offloads(dataclasses.replace(with_host(), device="cpu")) == ("none",)
    with pytest.raises(PlannerError, match="optimizers must have at least one"):
        Request(MODEL, "small", 4, machine_of(), 64, optimizers=())


# Only the batch is divisible by 2.
ODD = ModelConfig(vocab_size=385, hidden_size=175, num_layers=9, num_heads=5, sequence_length=32)


@pytest.mark.parametrize(
    ("model", "expected"),
    [(ODD, {"zero 1", "offload cpu", "zero 1 and offload cpu"}), (MODEL, {"offload cpu"})],
)
def test_where_nothing_fits_zero_or_offload_is_named(
    model: ModelConfig, expected: set[str]
) -> None:
    """With less and less memory, the options named in the message do fit, and free what it says."""
    said: set[str] = set()
    for power in range(50):  # from 60 MB to 3
        machine = dataclasses.replace(with_host(), memory_bytes=int(6e7 * 0.94**power))
        request = Request(model, "small", 4, machine, 64, memory_fraction=1.0)
        try:
            plan(dataclasses.replace(request, simulate=1))
        except PlannerError as error:
            found = re.search(
                r"On 4 GPUs, (.+) would do: with (.+) that frees (.+) GB each and "
                r"(?:takes|saves) \S+ s a step(?: longer)? \(modelled\)$",
                str(error),
            )
            if found is None or found[1] in said:
                continue
            said.add(found[1])
            words = found[1].replace(" and ", " ").split()
            named = dict(zip(words[::2], words[1::2], strict=True))
            chosen = OptimizerOptions(int(named.get("zero", 0)), named.get("offload", "none"))
            of_grid = AxisRules.parse(found[2])
            named_one = dataclasses.replace(request, optimizers=(chosen,), axes=of_grid)
            assert GridShape.parse(found[2]) in {c.job.grid for c in plan(named_one).configs}
            # At most masters and moments, and copies of gradients in fp32.
            assert 0 < float(found[3]) * 1e9 < 16 * model.num_parameters()
    assert said and said <= expected, said


def test_less_is_held_with_each_option() -> None:
    def held(zero: int, offload: str = "none") -> int:
        options = Options(micro_batches=4, optimizer=OptimizerOptions(zero, offload, 1 << 20))
        model = dataclasses.replace(MODEL, hidden_size=1024, num_layers=32)
        return memory_of(Job(model, GridShape(data=8), options, 64)).total

    assert held(2, "cpu") < held(2) < held(1) < held(0)
    assert held(1, "cpu") < held(0, "cpu") < held(0)
    assert held(1, "disk") == held(1, "cpu")


def test_the_trainers_file_says_where_the_state_is(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "[model]\n[optim]\nlr = 0.1\nzero = 2\noffload = 'disk'\nbucket_elements = 99\n"
    )
    assert load_optimizer(str(file)) == OptimizerOptions(2, "disk", 99)
    assert load_optimizer("gpt2-small") == OptimizerOptions()
    file.write_text("[model]\n")
    assert load_optimizer(str(file)) == OptimizerOptions()
    for line in (
        "zero = 3",
        "offload = 'gpu'",
        "bucket_elements = 0",
        "offload = 'cpu'\nname = 'muon'",
    ):
        file.write_text(f"[optim]\n{line}\n")
        with pytest.raises(InputError, match=rf"optim.{line.split()[0]} must be"):
            load_optimizer(str(file))
