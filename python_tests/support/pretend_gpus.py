"""Makes a machine seem to have GPUs, of given models and abilities of our kernels."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from axonn_ext.kernels import extension, host

H100_NAME = "NVIDIA H100 80GB HBM3"


def pretend_gpus(
    monkeypatch: pytest.MonkeyPatch,
    models: Sequence[str] = (H100_NAME,),
    *,
    why_none: str = "",
    source: str = "cutlass",
    reach: bool = True,
    driver_names: Sequence[str] | None = None,
) -> None:
    """Makes torch, the driver's files and our extension report these GPUs.

    why_none      why none of the fused kernels runs there
    source        the implementation of the fused kernels' GEMMs
    reach         whether the GPUs can access each other's memory
    driver_names  the names in the driver's files, if different from `models`
    """
    names = sorted(set(models)) if driver_names is None else list(driver_names)
    monkeypatch.setattr(host, "runs_cuda", lambda: True)
    monkeypatch.setattr(host, "nvidia_gpus", lambda: names)
    monkeypatch.setattr(host, "nvidia_driver", lambda: "580.65.06")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(models))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: models[number])
    properties = SimpleNamespace(total_memory=80 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: reach)
    monkeypatch.setattr(torch.ops.axonn, "_why_no_fused_here", lambda *_: why_none, raising=False)
    cuda = SimpleNamespace(gemm_source=lambda number: source, __file__=__file__)
    monkeypatch.setattr(extension, "cuda", cuda)
