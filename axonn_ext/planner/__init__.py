"""Chooses a grid to train on, and predicts a step's time and memory before a GPU is booked.

    machine = planner.load_machine("perlmutter")
    request = planner.Request(model, "my model", num_ranks=1024, machine=machine, batch_size=2048)
    planner.plan(request).configs[0].job.grid

Pure: it reads no file but the machine's and starts nothing. From the rest of the package it imports
only axonn_ext.spec, which describes models, grids and runs, and it never imports Torch.

A name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axonn_ext.planner.errors import PlannerError
    from axonn_ext.planner.estimate import Estimate
    from axonn_ext.planner.job import Job, Options
    from axonn_ext.planner.machines.machine import Machine, load_machine
    from axonn_ext.planner.memory.peak import Memory, memory_of
    from axonn_ext.planner.search.fastest import Plan, plan
    from axonn_ext.planner.search.remedies import smallest_that_fits
    from axonn_ext.planner.search.request import Request
    from axonn_ext.planner.simulation.events import Event, Timeline
    from axonn_ext.planner.simulation.simulate import simulate, timeline

__all__ = [
    "Estimate",
    "Event",
    "Job",
    "Machine",
    "Memory",
    "Options",
    "Plan",
    "PlannerError",
    "Request",
    "Timeline",
    "load_machine",
    "memory_of",
    "plan",
    "simulate",
    "smallest_that_fits",
    "timeline",
]

_HOMES = {
    "Estimate": "estimate",
    "Event": "simulation.events",
    "Job": "job",
    "Machine": "machines.machine",
    "Memory": "memory.peak",
    "Options": "job",
    "Plan": "search.fastest",
    "PlannerError": "errors",
    "Request": "search.request",
    "Timeline": "simulation.events",
    "load_machine": "machines.machine",
    "memory_of": "memory.peak",
    "plan": "search.fastest",
    "simulate": "simulation.simulate",
    "smallest_that_fits": "search.remedies",
    "timeline": "simulation.simulate",
}


def __getattr__(name: str) -> Any:
    """Loads a public name from the module that defines it (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"axonn_ext.planner.{_HOMES[name]}"), name)
