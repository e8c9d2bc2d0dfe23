"""The Triton kernels need no compiled part of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.triton

TOOLS = Path(__file__).resolve().parents[2] / "tools"
WITHOUT_THE_EXTENSION = """
import sys
sys.modules["axonn_ext._C"] = None
import triton_ptx
assert triton_ptx.KERNELS
"""


def test_kernels_are_compiled_where_the_package_is_not():
    """`make emulate` starts from a checkout without the compiled package."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_EXTENSION], cwd=TOOLS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
