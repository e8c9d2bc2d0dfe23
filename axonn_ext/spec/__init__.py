"""Describes a model, a grid and the options of a run in numbers and rules, without Torch.

    grid.py      the axes, the sizes of a grid, every grid of a number of ranks
    model.py     the sizes of a model, its Linears, its parameters and its arithmetic
    family.py    the common traits of a model family, and the list of all families
    goldfish.py  the options of Goldfish loss
    parallel.py  the options of a run: layouts, algorithms, roles of Linears, overlap
    pipeline.py  the order of a pipeline stage's tasks, and the split of layers into stages
    products.py  the matrix products that one rank of a grid computes
    rules.py     which model runs on which grid
    presets.py   models by name

The modules, the trainer and the planner all take these from here, so that they cannot disagree.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns __getattr__, __dir__ and __all__ of a package, which load a name at its first use.

    PEP 562. This lies in the lowest layer, in a file that every process reads.

    homes: the public names of each module, separated by spaces; a module of the package begins
        with a dot
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home_of[name], package), name)

    def listed() -> list[str]:
        module = vars(sys.modules[package])
        return sorted({*module, *module["__all__"]})

    return load, listed, sorted(home_of)
