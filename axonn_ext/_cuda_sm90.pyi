# What csrc/ops/cuda_sm90/bindings.cpp defines, where the GEMMs for sm_90 are built.

from typing import Any

def instances() -> list[dict[str, Any]]: ...
