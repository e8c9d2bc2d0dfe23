"""Finds machines of the planner by name, including "this"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from axonn_ext.planner.machines.machine import Machine, load_machine
from axonn_ext.spec import settings


def measured_file() -> Path | None:
    """Returns the file in which `axonn-ext bench links` keeps "this"; None if nothing is kept."""
    kept = settings.load().measured_machine
    return Path(kept) if kept else None


def find_machine(name: str, *, changes: Sequence[str] = ()) -> Machine:
    """Returns a known machine, "this", or the machine of a TOML file. Raises InputError.

    changes: keys of its file with other values; see load_machine.
    """
    return load_machine(name, this_file=measured_file(), changes=changes)
