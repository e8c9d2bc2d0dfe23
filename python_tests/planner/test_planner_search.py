"""Plans are legal, fit and come best first; and the messages if nothing fits."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections import Counter

import pytest

from axonn_ext.planner import (
    Job,
    Options,
    PlannerError,
    Request,
    memory_of,
    plan,
    simulate,
    smallest_that_fits,
    timeline,
)
from axonn_ext.planner.job import violations
from axonn_ext.planner.memory.fitting import those_that_fit
from axonn_ext.planner.search.choices import (
    POLICIES,
    fitting_jobs,
    fitting_with_some,
    jobs_of,
    variants_of,
)
from axonn_ext.planner.search.closed_forms import ClosedForms, closed_form_s, least_s
from axonn_ext.planner.search.fastest import SURELY_SLOWER, SURELY_SLOWER_IN_STAGES
from axonn_ext.planner.search.optimizers import optimizers_of, options_with, that_differ_on
from axonn_ext.planner.search.remedies import NO_MEMORY
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.optimizer import OptimizerOptions
from axonn_ext.spec.parallel import Overlap
from axonn_ext.spec.pipeline_options import PipelineOptions
from planner_machines import machine_of

MODEL = ModelConfig(512, 256, 4, 8, 128)


def request_of(**changes: object) -> Request:
    request = Request(MODEL, "small", 16, machine_of(), 64)
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


def test_best_first_and_each_grid_once() -> None:
    found = plan(request_of(top=100, simulate=10_000))
    times = [config.step_time_s for config in found.configs]
    assert times == sorted(times)
    grids = [config.job.grid for config in found.configs]
    assert len(set(grids)) == len(grids) > 10
    for config in found.configs:
        assert not list(violations(config.job))
        assert config.job.grid.size == 16
        assert config.memory == memory_of(config.job)
        assert config.memory.total <= found.request.memory_limit
        assert config.step_time_s == simulate(config.job, found.request.machine).step_time_s
    for machine in (machine_of(), dataclasses.replace(machine_of(), memory_bytes=60_000_000)):
        found = plan(request_of(machine=machine, simulate=1))
        assert found.fits + sum(found.rejected.values()) == found.num_considered
    assert found.rejected[NO_MEMORY] > 0


def test_nothing_better_is_missed() -> None:
    """Compares with every legal configuration of two layouts, fully simulated."""
    request = request_of(num_ranks=8, batch_size=16, simulate=10_000)
    best = plan(request).configs[0]
    for grid in [config.job.grid for config in plan(dataclasses.replace(request, top=99)).configs]:
        for layout in request.layouts:
            for parts in (1, 2, 4):
                for recompute in ("none", "attention", "every:2", "full"):
                    options = Options(layout=layout, micro_batches=parts, recompute=recompute)
                    job = Job(MODEL, grid, options, 16)
                    if not list(violations(job)):
                        other = timeline(job, request.machine).step_time_s
                        assert best.step_time_s <= other * 1.02  # error of simulating few layers


def test_all_that_is_reported_is_consistent() -> None:
    request = request_of()
    best = plan(request).configs[0]
    tokens = request.batch_size * MODEL.sequence_length
    assert best.tokens_per_s == pytest.approx(tokens / best.step_time_s)
    flops = MODEL.flops_per_token() * best.tokens_per_s / 16
    assert best.peak_fraction == pytest.approx(flops / request.machine.peak_flops["bf16"])
    assert 0 < best.peak_fraction < 1
    # Full attention instead of half: 2 more products of s x s / 2 per block, times 3 with backward.
    more = 6 * MODEL.num_layers * MODEL.sequence_length * MODEL.hidden_size
    both = best.whole_peak_fraction / best.peak_fraction
    assert both == pytest.approx(1 + more / MODEL.flops_per_token())
    waiting = sum(best.exposed_s.values())
    assert best.compute_s + waiting == pytest.approx(best.step_time_s, rel=0.02)


def test_what_is_given_is_not_searched() -> None:
    fixed = {"recompute": "every:2", "overlap": None, "save_gathered": True}
    request = request_of(fixed=fixed, layouts=("sharded",), micro_batches=(2,))
    for config in plan(request).configs:
        options = config.job.options
        assert options.recompute == "every:2" and options.overlap is None and options.save_gathered
        assert options.layout == "sharded" and options.micro_batches == 2


def test_heads_over_y_where_y_does_not_divide_the_sequences() -> None:
    model = ModelConfig(512, 256, 4, 8, 128)
    request = request_of(model=model, num_ranks=4, batch_size=2, layouts=("sharded",), top=99)
    by_grid = {config.job.grid: config.job.options for config in plan(request).configs}
    assert by_grid[GridShape(y=4)].heads_over_y
    assert not by_grid[GridShape(x=4)].heads_over_y


def test_less_memory_forces_recomputation_then_more_ranks() -> None:
    # A large batch at once, so that activations take most of the memory.
    request = request_of(batch_size=1024, micro_batches=(1,), memory_fraction=1.0)
    roomy = plan(request).configs[0]
    assert roomy.job.options.recompute == "none"
    kept = plan(dataclasses.replace(request, fixed={"recompute": "none"}, top=99)).configs
    least = least_memory(request, recompute="full")
    assert least < least_memory(request, recompute="none") <= min(c.memory.total for c in kept)

    tight = dataclasses.replace(request, machine=machine_of(memory=least))
    config = plan(tight).configs[0]
    assert config.job.options.recompute != "none"
    assert config.memory.total <= least
    assert config.step_time_s > roomy.step_time_s

    with pytest.raises(PlannerError, match=r"does not fit in memory .*\. (32|64) GPUs would do"):
        plan(dataclasses.replace(tight, machine=machine_of(memory=least - 1)))


def test_policies_between_none_and_all_fill_the_memory_there_is() -> None:
    """No fixed policy is faster than the policy that a search finds."""
    request = request_of(
        model=dataclasses.replace(MODEL, num_layers=8, family="llama"), batch_size=1024,
        micro_batches=(1,), memory_fraction=1.0, simulate=10_000,
    )  # fmt: skip
    low, high = (least_memory(request, recompute=policy) for policy in ("full", "none"))
    chosen = set()
    for step in (1, 2, 4, 6, 8):
        machine = machine_of(memory=low + (high - low) * step // 8)
        tight = dataclasses.replace(request, machine=machine)
        best = plan(tight).configs[0]
        chosen.add(best.job.options.recompute)
        for policy in POLICIES:
            fixed = dataclasses.replace(tight, fixed={"recompute": policy})
            try:
                given = plan(fixed).configs[0]
            except PlannerError:  # does not fit
                continue
            # Closed forms choose the policy, and differ from simulated steps by up to 1 %.
            assert best.step_time_s <= given.step_time_s * 1.01, (step, policy)
    assert {"full", "every:2"} <= chosen and len(chosen) >= 4


def least_memory(request: Request, *, recompute: str) -> int:
    """The least memory of all legal configurations, each computed in full."""
    fixed = dataclasses.replace(request, fixed={"recompute": recompute})
    return min(
        memory_of(dataclasses.replace(job, options=options)).total
        for job in jobs_of(fixed)
        if not list(violations(job))
        for options in variants_of(fixed, job)
    )


def test_what_fits_is_what_memory_of_counts_as_little_enough() -> None:
    draw = random.Random(5)
    for _ in range(100):
        model = ModelConfig(
            draw.choice([512, 8192]), 256, draw.choice([1, 2, 4, 9]), 8, 128,
            family=draw.choice(["gpt2", "llama", "opt"]), tie_embeddings=draw.random() < 0.5,
        )  # fmt: skip
        grid = GridShape(*(draw.choice([1, 2]) for _ in range(4)), pipe=draw.choice([1, 1, 2, 4]))
        schedule = draw.choice(["message_driven", "1f1b", "zero_bubble"])
        layout, parts = draw.choice(["sharded", "replicated"]), draw.choice([1, 4])
        algorithm, auto_fuses = draw.choice(["auto", "fused"]), draw.random() < 0.5
        jobs = [
            Job(model, grid, Options(
                recompute=recompute, save_gathered=saved, overlap=overlap,
                reshard_after_forward=reshards, layout=layout, micro_batches=parts,
                pipeline=PipelineOptions(schedule), algorithm=algorithm,
            ), 128)
            for recompute in ("none", "full")
            for saved in (False, True)
            for overlap in (Overlap(), None)
            for reshards in (True, False)
        ]  # fmt: skip
        if list(violations(jobs[0])):
            continue
        held = [memory_of(job, auto_fuses=auto_fuses).total for job in jobs]
        for limit in sorted({0, *held, *(total - 1 for total in held)}):
            found = those_that_fit(jobs, limit, auto_fuses=auto_fuses)
            assert found.fits == [total <= limit for total in held]
            too_full = [total for total in held if total > limit]
            assert all(limit + found.missing <= total for total in too_full)


def test_options_of_adamw_are_left_out_only_where_none_of_them_fits() -> None:
    """Each variant has the first options with which it fits, as if all had been computed."""
    draw = random.Random(1)
    optimizers = optimizers_of(OptimizerOptions(bucket_elements=2**16), (0, 1), ("none", "cpu"))
    model = ModelConfig(8192, 256, 9, 8, 128)
    host = {"host_link_bytes_per_s": 1e10, "host_memory_bytes_per_s": 1e10}
    machine = dataclasses.replace(machine_of(), **host)
    num_found: Counter[tuple[str, int]] = Counter()
    for _ in range(12):
        batch, data = draw.choice([32, 256]), draw.choice([1, 2, 8])
        grid = GridShape(*(draw.choice([1, 2]) for _ in range(3)), data=data)
        request = request_of(model=model, machine=machine, optimizers=optimizers)
        options = Options(micro_batches=draw.choice([1, 2]), optimizer=optimizers[0])
        job = Job(model, grid, options, batch)
        variants = variants_of(request, job)
        expected = [
            (Job(model, grid, options_with(v, optimizer), batch), v)
            for optimizer in that_differ_on(grid, optimizers) for v in variants
        ]  # fmt: skip
        totals = {way: memory_of(way).total for way, _ in expected}
        for limit in {t - d for t in totals.values() for d in (0, 1)}:
            smaller = dataclasses.replace(machine, memory_bytes=limit)
            tight = dataclasses.replace(request, machine=smaller, memory_fraction=1.0)
            first: dict[Options, Job] = {}
            for way, variant in expected:
                if totals[way] <= limit:
                    first.setdefault(variant, way)
            found = fitting_with_some(tight, job, variants)
            assert sorted(map(repr, found)) == sorted(map(repr, first.values()))
            num_found.update((f.options.optimizer.offload, f.options.optimizer.zero) for f in found)
    assert all(num_found[o.offload, o.zero] for o in optimizers)


def test_the_chosen_are_the_fastest_of_all_by_whole_closed_forms() -> None:
    """This holds although most closed forms are only bounded, not fully computed, and although
    recomputation is tried only where it may be needed, as in the last request."""
    requests = (
        request_of(), request_of(max_pipe=4, machine=machine_of(inter=1e9)),
        request_of(max_pipe=2, batch_size=1024, machine=machine_of(memory=80_000_000),
                   micro_batches=(1, 2, 4), fixed={"overlap": Overlap()}),
    )  # fmt: skip
    for request in requests:
        simulated = [c.job for c in plan(dataclasses.replace(request, top=10_000)).configs]
        forms = ClosedForms(request.machine)
        grids: dict[GridShape, float] = {}
        for job in jobs_of(request):
            if not list(violations(job)):
                ways = [
                    dataclasses.replace(options, recompute=policy)
                    for options in variants_of(request, job) if options.recompute == "none"
                    for policy in POLICIES
                ]  # fmt: skip
                for fitting in (f for way in ways for f in fitting_jobs(request, job, (way,))):
                    seconds = forms.seconds(fitting)
                    blocks = forms.blocks_of(fitting)
                    bounds = least_s(blocks, fitting), closed_form_s(blocks, fitting)
                    assert bounds[0] <= bounds[1] <= seconds
                    grids[job.grid] = min(seconds, grids.get(job.grid, math.inf))
        for pipe in {grid.pipe > 1 for grid in grids}:
            mine = [
                grid for grid in sorted(grids, key=grids.__getitem__) if (grid.pipe > 1) == pipe
            ]
            chosen = {job.grid for job in simulated if (job.grid.pipe > 1) == pipe}
            assert chosen == set(mine[: len(chosen)])


@pytest.mark.parametrize("inter", [2e10, 1e9])
def test_closed_forms_are_not_far_above_simulated_steps(inter: float) -> None:
    """So configurations that they find much slower than the best need no simulation."""
    optimizers = (OptimizerOptions(), OptimizerOptions(1))
    request = request_of(
        machine=machine_of(inter=inter), max_pipe=4, top=10_000, optimizers=optimizers
    )
    forms = ClosedForms(request.machine)
    found = plan(request).configs
    assert len({config.job.grid.pipe for config in found}) > 1
    for config in found:
        above = forms.seconds(config.job) / config.step_time_s
        of_stages = config.job.grid.pipe > 1
        assert above < (SURELY_SLOWER_IN_STAGES if of_stages else SURELY_SLOWER), config.job
    few = plan(dataclasses.replace(request, top=3)).configs
    assert few == found[:3]


def test_a_model_that_does_not_fit_says_how_many_ranks_would() -> None:
    large = ModelConfig(51200, 8192, 32, 64, 2048)
    request = request_of(model=large, num_ranks=2, batch_size=1024)
    with pytest.raises(PlannerError) as raised:
        plan(request)
    text = str(raised.value)
    assert "does not fit in memory" in text
    ranks = smallest_that_fits(request)
    assert ranks is not None and f"{ranks:,} GPUs would do" in text
    assert plan(dataclasses.replace(request, num_ranks=ranks)).configs
    with pytest.raises(PlannerError):
        plan(dataclasses.replace(request, num_ranks=ranks // 2))


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [(7, "6 or 8 GPUs would do"), (17, "16 or 32 GPUs would do"), (100, "96 or 128 GPUs would do")],
)
def test_where_nothing_divides_the_next_numbers_that_do_are_named(
    num_ranks: int, expected: str
) -> None:
    model = ModelConfig(768, 384, 2, 6, 64)
    request = request_of(model=model, num_ranks=num_ranks)
    with pytest.raises(PlannerError) as raised:
        plan(request)
    text = str(raised.value)
    assert expected in text and "memory" not in text and "GB" not in text
    for count in re.findall(r"\d+", expected):
        assert plan(dataclasses.replace(request, num_ranks=int(count))).configs


@pytest.mark.parametrize("num_ranks", [7, 17, 24, 48])
def test_where_the_batch_does_not_divide_the_nearest_batches_that_do_are_named(
    num_ranks: int,
) -> None:
    request = request_of(num_ranks=num_ranks)
    with pytest.raises(PlannerError) as raised:
        plan(request)
    match = re.search(r"so would a batch of (\d+) or (\d+) sequences$", str(raised.value))
    assert match is not None, raised.value
    below, above = int(match[1]), int(match[2])
    assert below < request.batch_size < above
    for size in range(below, above + 1):
        other = dataclasses.replace(request, batch_size=size)
        if size in (below, above):
            assert plan(other).configs
            continue
        with pytest.raises(PlannerError):
            plan(other)


def test_named_batches_are_multiples_of_the_micro_batches_that_are_asked_for() -> None:
    request = request_of(num_ranks=48, micro_batches=(8,))
    with pytest.raises(PlannerError, match=r"a batch of 48 or 72 sequences$"):
        plan(request)


def test_where_no_power_of_two_divides_fewer_ranks_are_named() -> None:
    request = request_of(model=ModelConfig(7, 7, 1, 1, 7), num_ranks=2, batch_size=1)
    with pytest.raises(PlannerError, match=r"\. 1 GPU would do, and so"):
        plan(request)
    cpus = dataclasses.replace(request.machine, device="cpu")
    with pytest.raises(PlannerError, match=r"cannot run on 2 ranks .*\. 1 rank would do, and so"):
        plan(dataclasses.replace(request, machine=cpus))


def test_a_model_that_fits_nowhere() -> None:
    request = request_of(num_ranks=1, batch_size=1, machine=machine_of(memory=100))
    with pytest.raises(PlannerError, match="No power of two of GPUs up to 1,048,576 does"):
        plan(request)
    two = dataclasses.replace(request, model=ModelConfig(7, 7, 1, 1, 7), num_ranks=2)
    with pytest.raises(PlannerError, match="does: take a batch and a model with more divisors"):
        plan(two)


def test_a_vocabulary_that_does_not_divide_is_padded() -> None:
    model = ModelConfig(50257, 256, 2, 8, 64)
    found, even = (plan(request_of(model=m)) for m in (model, replaced(model, 50304)))
    assert found.fits == even.fits and found.rejected == even.rejected
    for config in found.configs:
        grid = config.job.grid
        multiple = 128 * grid.x * grid.z
        rows = 50257 if 50257 % (grid.x * grid.z) == 0 else -(-50257 // multiple) * multiple
        assert config.job.placed_model.vocab_size == rows
        whole = dataclasses.replace(config.job, model=replaced(model, rows))
        assert simulate(config.job, request_of().machine) == simulate(whole, request_of().machine)
        assert config.memory == memory_of(whole)
        flops = model.flops_per_token() * config.tokens_per_s / grid.size  # without padding
        assert config.peak_fraction == pytest.approx(
            flops / request_of().machine.peak_flops["bf16"]
        )


def replaced(model: ModelConfig, vocab_size: int) -> ModelConfig:
    return dataclasses.replace(model, vocab_size=vocab_size)


def test_memory_is_of_the_machines_device() -> None:
    cpus = dataclasses.replace(machine_of(), device="cpu")
    for machine in (machine_of(), cpus):
        for config in plan(request_of(machine=machine)).configs:
            assert config.memory == memory_of(config.job, device=machine.device)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_ranks": 0}, "num_ranks must be a whole number >= 1, got 0"),
        ({"num_ranks": 2**21}, "num_ranks must be a whole number <= 1048576, got 2097152"),
        ({"batch_size": -4}, "batch_size must be a whole number >= 1, got -4"),
        (
            {"memory_fraction": float("nan")},
            "memory_fraction must be a finite number > 0 and <= 1, got nan",
        ),
        ({"batch_size": 10**18}, "batch_size must be a whole number <= 1099511627776, got"),
        ({"batch_size": 64, "micro_batches": (7,)}, r"divide batch_size=64, got 7 \(4 and 8 do\)"),
        ({"micro_batches": (2, 65)}, r"micro_batches must divide .*, got 65 \(64 does\)"),
        ({"micro_batches": (0,)}, "micro_batches must be whole numbers >= 1, got 0"),
        ({"micro_batches": ()}, "micro_batches must be None or name at least one"),
        ({"layouts": ()}, "layouts must be some of sharded, replicated"),
        ({"layouts": ("shard",)}, "layouts must be some of sharded, replicated"),
        ({"fixed": {"recompuet": True}}, "fixed may hold heads_over_y, .*, got recompuet"),
        ({"fixed": {"layout": "sharded"}}, "fixed may hold heads_over_y, .*, got layout"),
        ({"fixed": {"recompute": True}}, "recompute must be none, attention, .*, got True"),
        ({"fixed": {"recompute": "every:1"}}, "recompute must be .* or full, got 'every:1'"),
        ({"fixed": {"overlap": True}}, "overlap must be None, an Overlap or 'on', got True"),
        ({"dtype": "fp16"}, "machine test has no peak for dtype 'fp16', only for bf16, fp32"),
    ],
)
def test_wrong_requests_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        request_of(**changes)


def test_equal_requests_have_equal_plans() -> None:
    first, second = plan(request_of()), plan(request_of())
    assert first.configs == second.configs
