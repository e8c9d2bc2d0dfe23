"""When a watchdog asks for reports, and how long it gathers them."""

from __future__ import annotations

import pytest

from axonn_ext.watchdog.watchdog import Times


@pytest.mark.parametrize("timeout_s", [0.01, 1.0, 5.0, 60.0, 600.0, 1e6])
def test_reports_are_gathered_before_the_wait_fails(timeout_s: float) -> None:
    """As long as they take may pass before a question is heard."""
    times = Times.before(timeout_s)
    assert times.gather > 0
    assert times.long + 2 * times.gather <= timeout_s
    assert times.long >= 0.75 * timeout_s
