"""ranks/collectives.py: which algorithm runs; python_tests/ops has values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from axonn_ext.ranks.collectives import algorithm_of_collective


@pytest.mark.parametrize(
    ("device", "algorithm", "runs"),
    [
        ("cpu", "fused", "fused"),
        ("cuda", "fused", "sequential"),  # GPUs have a fused one only beside a matmul
        ("cuda", "chunked", "chunked"),
        ("cuda", "auto", "auto"),
    ],
)
def test_the_algorithm_of_a_collective(device: str, algorithm: str, runs: str) -> None:
    with FakeTensorMode():  # a GPU's tensor without a GPU
        tensor = torch.empty(2, 3, device=device)
    assert algorithm_of_collective(algorithm, tensor) == runs
