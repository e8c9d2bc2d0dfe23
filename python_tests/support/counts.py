"""How much a function does, as counts that do not depend on the processor."""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_of(function: Callable[[], object]) -> int:
    """Calls of Python functions while this one runs, which takes twice as long as it would."""
    profile = cProfile.Profile(builtins=False)
    profile.runcall(function)
    return sum(entry.callcount for entry in profile.getstats())


def lines_of(function: Callable[[], object]) -> int:
    """Lines that are executed while this function runs: those of loops without a call, too."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
