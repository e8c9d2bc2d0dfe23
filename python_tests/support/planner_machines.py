"""Machines that tests plan for, and what a task takes on them."""

from __future__ import annotations

from axonn_ext.planner import Machine
from axonn_ext.planner.machines.attention import Attention
from axonn_ext.planner.machines.links import Level, Links
from axonn_ext.planner.machines.products import Products
from axonn_ext.planner.simulation.costs import Costs
from axonn_ext.planner.step.tasks import Task


def machine_of(*, hidden_share: float = 0.0, inter: float = 2e10, memory: int = 10**10) -> Machine:
    """A made-up machine with nodes of 4 ranks; collectives take about as long as products."""
    peak = {"bf16": 1e13, "fp32": 5e12}
    best = {dtype: 0.7 * flops for dtype, flops in peak.items()}
    levels = (Level("node", 4, 1e11, 1e-6), Level("cluster", None, inter, 1e-5))
    return Machine(
        name="test", description="made up", memory_bytes=memory, memory_bytes_per_s=1e12,
        peak_flops=peak, products=Products(best, memory_bytes_per_s=1e12, launch_s=1e-6),
        attention=Attention.flat({dtype: 0.5 * flops for dtype, flops in peak.items()}),
        links=Links(levels),
        hidden_share=hidden_share, launch_s=1e-6,
    )  # fmt: skip


def seconds_of(costs: Costs, task: Task) -> float:
    """Returns the time of a task with the collectives before and after it, in sequence."""
    return costs.compute(task) + sum(map(costs.collective, (*task.before, *task.after)))
