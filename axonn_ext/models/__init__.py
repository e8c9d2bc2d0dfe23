"""Transformers that run on a grid, each built from one frozen config.

Importing this package does not import Torch: public names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axonn_ext.spec import lazy_names

if TYPE_CHECKING:
    from axonn_ext.models.builder import build as build
    from axonn_ext.models.transformer import Transformer as Transformer
    from axonn_ext.spec.model import ModelConfig as ModelConfig
    from axonn_ext.spec.parallel import ParallelConfig as ParallelConfig
    from axonn_ext.spec.rules import check as check
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {
        ".builder": "build",
        ".transformer": "Transformer",
        "axonn_ext.spec.model": "ModelConfig",
        "axonn_ext.spec.parallel": "ParallelConfig",
        "axonn_ext.spec.rules": "check",
    })  # fmt: skip
