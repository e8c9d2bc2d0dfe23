"""Finds the planner's machines by name, including "this", and by the GPUs of a host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from axonn_ext.planner.machines.machine import Machine, load_machine, machine_file, machine_names
from axonn_ext.spec import settings
from axonn_ext.spec.files.files import read_toml


def measured_file() -> Path | None:
    """Returns the file in which `axonn-ext bench links` keeps "this"; None if it keeps none."""
    kept = settings.load().measured_machine
    return Path(kept) if kept else None


def find_machine(name: str, *, changes: Sequence[str] = ()) -> Machine:
    """Returns a known machine, "this", or the machine of a TOML file. Raises InputError.

    changes: new values for keys of its file; see load_machine.
    """
    return load_machine(name, this_file=measured_file(), changes=changes)


def machine_of_gpu(gpu: str) -> str | None:
    """Returns the package's machine whose `gpu` is part of a GPU's name; None if there is none.

    gpu: the name from the driver. Of several matches, the one with the longest `gpu` counts.
    """
    parts = {read_toml(machine_file(name)).get("gpu"): name for name in machine_names()}
    found = [part for part in parts if part and part in gpu]
    return parts[max(found, key=len)] if found else None
