"""How long tests wait for what must happen."""

from __future__ import annotations

# Only a hang takes that long, however slow the processor is and whatever else runs on it. It is
# shorter than the 600 s that ranks wait for each other by default (AXONN_TIMEOUT_SECONDS): an error
# that comes while a test waits has not come of that time limit.
HANG_SECONDS = 300.0
