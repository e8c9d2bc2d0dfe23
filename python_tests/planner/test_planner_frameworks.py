"""The configurations that other frameworks may choose, which ours may choose, too."""

from __future__ import annotations

import dataclasses
import re

import pytest

from axonn_ext.planner import PlannerError, Request, load_machine, plan
from axonn_ext.planner.search.choices import jobs_of
from axonn_ext.planner.search.frameworks import FRAMEWORKS, plan_framework, plan_with_all
from axonn_ext.spec.model import ModelConfig

MODEL = ModelConfig(51200, 1024, 8, 16, 1024)


def request_of(**changes: object) -> Request:
    request = Request(MODEL, "small", 32, load_machine("perlmutter"), 128)
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


def grids_of_framework(name: str) -> set[tuple[int, ...]]:
    return {
        (g.x, g.y, g.z, g.data, g.pipe)
        for g in (job.grid for job in jobs_of(FRAMEWORKS[name].request(request_of())))
    }


def test_grids_are_those_that_each_has() -> None:
    assert grids_of_framework("ddp") == {(1, 1, 1, 32, 1)}
    assert grids_of_framework("zero3") == {(1, 1, 32, 1, 1)}
    powers = [2**i for i in range(6)]
    assert grids_of_framework("fsdp") == {(1, 1, z, 32 // z, 1) for z in powers}
    stages = [1, 2, 4, 8]  # up to the number of blocks
    tensor = [1, 2, 4]  # up to the ranks of a node
    assert grids_of_framework("megatron") == {
        (x, 1, 1, 32 // (x * pipe), pipe) for x in tensor for pipe in stages
    }
    assert grids_of_framework("axonn2021") == {(1, 1, 1, 32 // pipe, pipe) for pipe in stages}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_plan_of_a_peer_has_only_what_it_has(name: str) -> None:
    framework, job = FRAMEWORKS[name], plan_framework(FRAMEWORKS[name], request_of()).job
    assert (job.grid.x, job.grid.y, job.grid.z, job.grid.data, job.grid.pipe) in grids_of_framework(
        name
    )
    options = job.options
    assert options.layout == "sharded" and not options.heads_over_y
    assert (
        options.optimizer.zero in framework.zero and options.optimizer.offload in framework.offloads
    )
    if job.grid.pipe > 1:
        assert options.pipeline in framework.pipelines
    for key, value in framework.fixed.items():
        assert getattr(options, key) == value


def test_the_plan_is_the_best_of_what_a_peer_may_choose() -> None:
    """Megatron-LM's optimizer may be distributed or not, regardless of the request."""
    framework = FRAMEWORKS["megatron"]
    for zero in (0, 2):
        request = request_of()
        (own,) = request.optimizers
        request = request_of(optimizers=(dataclasses.replace(own, zero=zero),))
        best, whole = plan_framework(framework, request), framework.request(request)
        assert [o.zero for o in whole.optimizers] == [0, 1]
        times = [
            plan(dataclasses.replace(whole, optimizers=(one,))).configs[0].step_time_s
            for one in whole.optimizers
        ]
        assert best.step_time_s == pytest.approx(min(times), rel=1e-3)


def test_ours_with_all_of_these_is_never_slower() -> None:
    request = request_of()
    found = [plan_framework(framework, request) for framework in FRAMEWORKS.values()]
    best = plan_with_all(request, found)
    assert best.step_time_s <= min(e.step_time_s for e in found)
    assert best.step_time_s <= plan(request).configs[0].step_time_s
    assert plan_with_all(request, []).step_time_s < max(e.step_time_s for e in found)


def test_what_is_fixed_for_ours_is_fixed_for_frameworks() -> None:
    request = request_of(fixed={"recompute": "full"}, micro_batches=(4,))
    for framework in FRAMEWORKS.values():
        options = plan_framework(framework, request).job.options
        assert (options.recompute, options.micro_batches) == ("full", 4)


def test_a_machine_that_does_not_know_its_host_has_no_offload() -> None:
    machine = dataclasses.replace(load_machine("perlmutter"), host_link_bytes_per_s=None)
    for of, offloads in ((machine, ["none"]), (load_machine("perlmutter"), ["none", "cpu"])):
        request = FRAMEWORKS["axonn2021"].request(request_of(machine=of))
        assert [o.offload for o in request.optimizers] == offloads


def test_a_peer_for_which_the_model_is_too_large() -> None:
    large = ModelConfig(51200, 12288, 42, 96, 2048)
    with pytest.raises(PlannerError, match="does not fit in memory"):
        plan_framework(FRAMEWORKS["ddp"], request_of(model=large, num_ranks=256, batch_size=512))


def test_each_names_a_source() -> None:
    for name, framework in FRAMEWORKS.items():
        assert re.search(r"arXiv:\d{4}\.\d{5}", framework.source), name
