"""A plugin of pytest: leaves out what the GPU in software does not run, each with its reason."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

LEFT_OUT = Path(__file__).parents[1] / "cpp_tests/gpu_machine/torch/left_out.toml"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    left_out = tomllib.loads(LEFT_OUT.read_text())["left_out"]
    for item in items:
        name = f"{item.path.name}::{item.name}"
        for entry in left_out:
            # Brackets of parameters are no set of characters here.
            if any(fnmatchcase(name, tests.replace("[", "[[]")) for tests in entry["tests"]):
                item.add_marker(pytest.mark.skip(reason=f"left out: {entry['because']}"))
