"""What is known of each op, in one OpSpec; importing this makes all ops traceable."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from axonn_ext.ops.spec import OpSpec
from axonn_ext.ops.specs import collectives, linear, local, matmuls

# By the op's name in torch.ops.axonn. Those with an underscore are missing: no trace sees them,
# since only the kernels of these call them.
SPECS: Mapping[str, OpSpec] = MappingProxyType(
    {spec.name: spec for spec in (*collectives.SPECS, *matmuls.SPECS, *linear.SPECS, *local.SPECS)}
)

for _spec in SPECS.values():
    torch.library.register_fake(f"axonn::{_spec.name}")(_spec.fake)
