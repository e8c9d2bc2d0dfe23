"""What the fused ops on GPUs say of symmetric memory that does not tell whom a GPU reaches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

CSRC = Path(__file__).resolve().parents[2] / "csrc"

pytestmark = pytest.mark.slow  # compiles headers of torch


@pytest.fixture(scope="module")
def reaches_all_peers(tmp_path_factory):
    """The C++ function, asked of a memory that gives this answer, or none."""
    cpp_extension.load(
        "axonn_direct_access_test",
        [str(Path(__file__).with_name("direct_access.cpp"))],
        extra_include_paths=[str(CSRC)],
        extra_cflags=["-std=c++20", "-O0"],
        build_directory=str(tmp_path_factory.mktemp("direct_access")),
        is_python_module=False,
    )
    return torch.ops.axonn_direct_access_test.reaches_all_peers


@pytest.mark.parametrize("answer", [False, True])
def test_the_answer_is_torchs(reaches_all_peers, answer):
    assert reaches_all_peers(answer) is answer


def test_memory_that_does_not_tell_is_not_implemented(reaches_all_peers):
    with pytest.raises(NotImplementedError) as raised:
        reaches_all_peers(None)
    message = str(raised.value)
    assert message.startswith(
        "matmul_all_reduce: algorithm='fused' needs GPUs that reach each other's memory, "
        "and torch's symmetric memory of group 'model' does not tell whether they do: NYI"
    ), message
    assert "use 'auto', 'chunked' or 'sequential'" in message
