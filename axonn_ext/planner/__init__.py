"""Chooses a grid to train on, and predicts a step's time and memory before a GPU is booked.

    machine = planner.load_machine("perlmutter")
    request = planner.Request(model, "my model", num_ranks=1024, machine=machine, batch_size=2048)
    planner.plan(request).configs[0].job.grid

Pure: it reads no file but the machine's and starts nothing. From the rest of the package it imports
only axonn_ext.spec, which describes models, grids and runs, and it never imports Torch.

A name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axonn_ext.spec import lazy_names

if TYPE_CHECKING:
    from axonn_ext.planner.errors import PlannerError as PlannerError
    from axonn_ext.planner.estimate import Estimate as Estimate
    from axonn_ext.planner.job import Job as Job
    from axonn_ext.planner.job import Options as Options
    from axonn_ext.planner.machines.machine import Machine as Machine
    from axonn_ext.planner.machines.machine import load_machine as load_machine
    from axonn_ext.planner.memory.peak import Memory as Memory
    from axonn_ext.planner.memory.peak import memory_of as memory_of
    from axonn_ext.planner.search.fastest import Plan as Plan
    from axonn_ext.planner.search.fastest import plan as plan
    from axonn_ext.planner.search.remedies import smallest_that_fits as smallest_that_fits
    from axonn_ext.planner.search.request import Request as Request
    from axonn_ext.planner.simulation.events import Event as Event
    from axonn_ext.planner.simulation.events import Timeline as Timeline
    from axonn_ext.planner.simulation.simulate import simulate as simulate
    from axonn_ext.planner.simulation.simulate import timeline as timeline
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {
        ".errors": "PlannerError",
        ".estimate": "Estimate",
        ".job": "Job Options",
        ".machines.machine": "Machine load_machine",
        ".memory.peak": "Memory memory_of",
        ".search.fastest": "Plan plan",
        ".search.remedies": "smallest_that_fits",
        ".search.request": "Request",
        ".simulation.events": "Event Timeline",
        ".simulation.simulate": "simulate timeline",
    })  # fmt: skip
