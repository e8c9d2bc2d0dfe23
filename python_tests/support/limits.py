"""The time limit of tests that wait for something."""

from __future__ import annotations

# Only a hang takes this long, even on a slow or busy processor. It is shorter than the 600 s that
# ranks wait for each other by default (AXONN_TIMEOUT_SECONDS), so an error that a test sees before
# its limit does not come from that timeout.
HANG_SECONDS = 300.0
