"""The gathers of weights in the planner's schedule, compared with the orchestrator's decisions."""

from __future__ import annotations

import itertools

import pytest

from axonn_ext import _C
from axonn_ext.planner import Event, Job, Machine, Options, timeline
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.parallel import Overlap
from planner_machines import machine_of

MODEL = ModelConfig(512, 256, 12, 8, 128)
GRID = GridShape(z=8, data=2)
LINEARS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
BYTES = {w.name: 2 * w.n * w.k for w in MODEL.block_linears}
TABLE = 2 * MODEL.vocab_size * MODEL.hidden_size
BLOCK = sum(BYTES.values())


def uses_of_step(recompute: str, parts: int) -> list[tuple[str, str]]:
    """(weight, phase) in the order of a step. The table is tied, so it is one weight."""
    uses = []
    for _ in range(parts):
        uses.append(("table", "forward"))
        uses += [(f"{i}.{w}", "forward") for i in range(MODEL.num_layers) for w in LINEARS]
        uses += [("table", "forward"), ("table", "backward")]
        for i in reversed(range(MODEL.num_layers)):
            if recompute == "full":
                uses += [(f"{i}.{w}", "backward") for w in LINEARS]
            uses += [(f"{i}.{w}", "backward") for w in reversed(LINEARS)]
    return uses


def decided(overlap: Overlap, recompute: str, parts: int) -> list[tuple[int, str]]:
    """(index of the use that starts it, weight) of each gather in a step whose order is known."""
    plan = _C.GatherPlan(num_prefetched=overlap.prefetch, budget_bytes=overlap.gathered_bytes)
    names = ["table", *(f"{i}.{w}" for i in range(MODEL.num_layers) for w in LINEARS)]
    numbers = {
        name: plan.add_weight(TABLE if name == "table" else BYTES[name.split(".", 1)[1]])
        for name in names
    }
    phases = {"forward": _C.Phase.FORWARD, "backward": _C.Phase.BACKWARD}
    gathers: list[tuple[int, str]] = []
    for step in range(2):
        for at, (name, phase) in enumerate(uses_of_step(recompute, parts)):
            for action in plan.use(numbers[name], phases[phase]):
                if step == 1 and action.kind == _C.ActionKind.GATHER:
                    gathers.append((at, names[action.weight]))
            plan.release(numbers[name])
        plan.end_step()
    return gathers


def bytes_of(gathers: list[str]) -> int:
    return sum(TABLE if name == "table" else BYTES[name.split(".", 1)[1]] for name in gathers)


BUDGETS = (
    0, BYTES["mlp.up"], 2 * BYTES["mlp.up"], BLOCK, 2 * BLOCK + TABLE, 7 * BLOCK + TABLE,
    12 * BLOCK + TABLE,
)  # fmt: skip


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("parts", [1, 3])
def test_as_many_bytes_are_gathered_as_the_orchestrator_decides(recompute: str, parts: int) -> None:
    """At each turn between two passes, the schedule may differ by a part of a block: it divides the
    budget into fractions of a block, the orchestrator into whole weights."""
    for budget, prefetch in itertools.product(BUDGETS, (0, 1, 2, 4, 8)):
        if recompute == "full" and budget < max(BYTES.values()):
            continue  # the program assumes that the first weight of a block's backward is kept
        overlap = Overlap(prefetch=prefetch, gathered_bytes=budget)
        job = Job(MODEL, GRID, Options(overlap=overlap, recompute=recompute, micro_batches=parts),
                  192)  # fmt: skip
        real = bytes_of([name for _, name in decided(overlap, recompute, parts)])
        modelled = sum(
            share_gathered(e) * bytes_of([weight_of(e)]) for e in gathers_of(job, machine_of())
        )
        turns = 2 * parts - 1
        assert abs(modelled - real) <= turns * 1.01 * BLOCK, (budget, prefetch)


def test_as_many_gathers_are_ahead_of_their_use() -> None:
    """Weights that do not fit next to the one in use are not prefetched. Over fast links, exactly
    the prefetched gathers start during computation. At the turn, the schedule may gather parts of
    four weights where the orchestrator gathers some of them whole."""
    fast = machine_of(inter=1e12)
    for budget, prefetch in itertools.product(BUDGETS[:5], (0, 1, 2, 4)):
        overlap = Overlap(prefetch=prefetch, gathered_bytes=budget)
        uses = uses_of_step("none", 1)
        real = sum(uses[at][0] != name for at, name in decided(overlap, "none", 1))
        events = timeline(Job(MODEL, GRID, Options(overlap=overlap), 192), fast).events
        computing = [(e.start_s, e.end_s) for e in events if e.stream == "compute"]
        ahead = sum(
            any(start <= gather.start_s < end - 1e-12 for start, end in computing)
            for gather in gathers_of(Job(MODEL, GRID, Options(overlap=overlap), 192), fast)
        )
        assert abs(real - ahead) <= 4, (budget, prefetch)


def gathers_of(job: Job, machine: Machine) -> list[Event]:
    """The gathers of weights of a step."""
    return [
        e for e in timeline(job, machine).events
        if e.stream == "z" and e.name.endswith("all_gather") and not e.name.startswith("order")
    ]  # fmt: skip


def weight_of(gather: Event) -> str:
    name = gather.name.split(":")[0].removesuffix(" dgrad")
    return "table" if name in ("embedding", "lm_head") else name


def share_gathered(gather: Event) -> float:
    """The fraction of a weight that is gathered, since a part of it may be kept."""
    link = machine_of().link(GRID, "z")
    ranks = GRID.z
    sent = bytes_of([weight_of(gather)]) * (ranks - 1) / ranks
    return gather.busy_s / (sent / link.bytes_per_s + (ranks - 1) * link.latency_s)
