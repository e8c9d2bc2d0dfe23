"""ranks/collectives.py: the choice of algorithm; python_tests/ops tests values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from axonn_ext.ranks.collectives import algorithm_of_collective


@pytest.mark.parametrize(
    ("device", "algorithm", "runs"),
    [
        ("cpu", "fused", "fused"),
        ("cuda", "fused", "sequential"),  # on GPUs, "fused" needs a matmul
        ("cuda", "chunked", "chunked"),
        ("cuda", "auto", "auto"),
    ],
)
def test_the_algorithm_of_a_collective(device: str, algorithm: str, runs: str) -> None:
    with FakeTensorMode():  # gives a CUDA tensor without a GPU
        tensor = torch.empty(2, 3, device=device)
    assert algorithm_of_collective(algorithm, tensor) == runs
