"""Overrides of single numbers in a machine's file, and their effect on a plan."""

from __future__ import annotations

import dataclasses

import pytest

from axonn_ext.planner import Request, load_machine, plan
from axonn_ext.planner.machines.links import MeasuredLink
from axonn_ext.planner.machines.overrides import changed
from axonn_ext.planner.machines.scaled_links import with_levels
from axonn_ext.planner.search.sensitivity import CHANGE, machines, variants
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig

MODEL = ModelConfig(51200, 1024, 8, 16, 1024)


def test_changed_keys_and_no_others() -> None:
    own = load_machine("perlmutter")
    machine = load_machine(
        "perlmutter",
        changes=("levels.cluster.bytes_per_s=4e10", "slowdown=1.5", "peak_flops.bf16=1e14",
                 "levels.0.measured.1.bytes_per_s = 1e11"),
    )  # fmt: skip
    node, cluster = machine.links.levels
    assert (cluster.bytes_per_s, machine.slowdown) == (4e10, 1.5)
    assert machine.peak_flops == {**own.peak_flops, "bf16": 1e14}
    assert node.measured[1].bytes_per_s == 1e11
    assert node.measured[0] == own.links.levels[0].measured[0]
    assert cluster.latency_s == own.links.levels[1].latency_s
    assert machine.memory_bytes == own.memory_bytes
    assert machine.name == (
        "perlmutter with levels.cluster.bytes_per_s=4e10 with slowdown=1.5 with "
        "peak_flops.bf16=1e14 with levels.0.measured.1.bytes_per_s = 1e11"
    )
    assert load_machine("perlmutter").links == own.links  # the override is not cached


def test_a_change_of_a_change() -> None:
    assert changed({"a": {"b": 1}}, ["a.b=2", "a.b=3", "a.c='x'"]) == {"a": {"b": 3, "c": "x"}}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("slowdown", "expected KEY=VALUE"),
        ("=2", "expected KEY=VALUE"),
        ("levels..ranks=2", "expected KEY=VALUE"),
        ("slowdown=", "expected a number"),
        ("slowdown=fast", "expected a number"),
        ("slowdown=2\nname='x'", "expected a number"),
        ("slowdown=[" + "[" * 5000, "expected a number"),
        ("slowdown.x=2", "slowdown is not a table, so it has no x"),
        ("nothing.x=2", "unknown table 'nothing'"),
        ("slowdwn=2", "did you mean slowdown"),
        ("levels.rack.ranks=2", "unknown element of levels 'rack'"),
        ("levels.node.ranks.x=2", "levels.node.ranks is not a table, so it has no x"),
        ("levels.ranks=2", "levels is not a table, so it has no ranks"),
        ("levels.node.latency_s=-1", "levels[0].latency_s must be a finite number > 0, got -1"),
        ("slowdown=nan", "slowdown must be a finite number >= 1, got nan"),
    ],
)
def test_mistakes(change: str, expected: str) -> None:
    with pytest.raises(InputError) as raised:
        load_machine("perlmutter", changes=(change,))
    assert expected in str(raised.value)


def test_links_that_differ_in_one_thing() -> None:
    own = load_machine("frontier")
    found = dict(machines(own))
    assert len(found) == 8
    inside, across = GridShape(x=4, data=64), GridShape(data=256)
    rate = own.link(inside, "x").bytes_per_s
    slower = found["bandwidth of node -20%"].link(inside, "x")
    assert slower.bytes_per_s == pytest.approx((1 - CHANGE) * rate)
    assert found["bandwidth of cluster +20%"].link(inside, "x") == own.link(inside, "x")
    wire = own.link(across, "data")
    faster = found["bandwidth of cluster +20%"].link(across, "data")
    assert faster.bytes_per_s == pytest.approx((1 + CHANGE) * wire.bytes_per_s)
    later = found["latency of all links +20%"].link(across, "data")
    assert later.latency_s == pytest.approx((1 + CHANGE) * wire.latency_s)
    assert later.bytes_per_s == wire.bytes_per_s
    node, *outer = own.links.levels
    measured = (MeasuredLink(1, 4, rate, latency_s=1e-5),)
    own = with_levels(own, (dataclasses.replace(node, measured=measured), *outer))
    later = dict(machines(own))["latency of all links +20%"].link(inside, "x")
    assert later.latency_s == pytest.approx((1 + CHANGE) * 1e-5)
    shared = found["contention in cluster +20%"].link(across, "data")
    assert shared.bytes_per_s == pytest.approx(wire.bytes_per_s / (1 + CHANGE))


def test_slower_links_make_no_step_faster() -> None:
    request = Request(MODEL, "small", 16, load_machine("perlmutter"), 64)
    best = plan(request).configs[0]
    for v in variants(request, best):
        slower = "-20%" in v.what if "bandwidth" in v.what else "+20%" in v.what
        for step in (v.same.step_time_s, v.best.step_time_s):
            assert (step >= best.step_time_s) if slower else (step <= best.step_time_s)
        assert v.best.step_time_s <= v.same.step_time_s
        assert v.same.job == best.job
