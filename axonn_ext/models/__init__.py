"""Transformers that run on a grid, each built from one frozen config.

Importing this package does not import Torch: public names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axonn_ext.models.builder import build
    from axonn_ext.models.transformer import Transformer
    from axonn_ext.spec.model import ModelConfig
    from axonn_ext.spec.parallel import ParallelConfig
    from axonn_ext.spec.rules import check

__all__ = ["ModelConfig", "ParallelConfig", "Transformer", "build", "check"]

_HOMES = {
    "ModelConfig": "spec.model",
    "ParallelConfig": "spec.parallel",
    "Transformer": "models.transformer",
    "build": "models.builder",
    "check": "spec.rules",
}


def __getattr__(name: str) -> Any:
    """Loads a public name from the module that defines it (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"axonn_ext.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
