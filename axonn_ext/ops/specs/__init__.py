"""Collects the OpSpec of each op. Importing this package makes all ops traceable."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from axonn_ext.ops.spec import OpSpec
from axonn_ext.ops.specs import collectives, linear, local, loss, matmuls

# The name of an op in torch.ops.axonn -> its spec. Ops whose names begin with an underscore have
# none: only the kernels of the other ops call them, so they never appear in a trace.
SPECS: Mapping[str, OpSpec] = MappingProxyType(
    {spec.name: spec for part in (collectives, matmuls, linear, loss, local) for spec in part.SPECS}
)

for _spec in SPECS.values():
    torch.library.register_fake(f"axonn::{_spec.name}")(_spec.fake)
