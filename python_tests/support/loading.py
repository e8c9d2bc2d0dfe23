"""Loads programs outside of packages: those of tools/, and setup.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(path: str) -> ModuleType:
    """Loads a program by its path in the repository, as a module."""
    return load_all(path)[Path(path).stem]


def load_all(path: str) -> dict[str, ModuleType]:
    """Loads a program; returns it and the repository's modules that it imports, by name.

    Restores sys.path and sys.modules, so that another load gets new modules.
    """
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    before = dict(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str((ROOT / path).parent))  # as Python does for a program
        patch.setitem(sys.modules, spec.name, program)  # dataclasses look up annotations there
        try:
            spec.loader.exec_module(program)
        finally:
            beside = {
                name: module
                for name, module in sys.modules.items()
                if name not in before and _is_of_tools(module)
            }
            for name in beside:
                del sys.modules[name]
    return beside | {spec.name: program}


def _is_of_tools(module: ModuleType) -> bool:
    return Path(getattr(module, "__file__", None) or "").parent == ROOT / "tools"
