"""Machines of the planner by name, "this" among them."""

from __future__ import annotations

from pathlib import Path

from axonn_ext import settings
from axonn_ext.planner.machine import Machine, load_machine


def measured_file() -> Path | None:
    """Where `axonn-ext bench links` leaves the machine "this"; None where nothing is kept."""
    kept = settings.load().measured_machine
    return Path(kept) if kept else None


def find_machine(name: str) -> Machine:
    """A known machine, "this", or that of a TOML file. Raises PlannerError."""
    return load_machine(name, this_file=measured_file())
