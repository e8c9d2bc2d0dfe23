"""Where watchdogs write, and how others read it. Does not load Torch."""

from __future__ import annotations

import signal
import time
from pathlib import Path

SIGNAL = signal.SIGUSR2  # asks for reports
HANGS = "hangs"  # the folder of reports, in a run's folder
SUMMARY_FILE = "summary.txt"
ASKED = "-asked"  # suffix of the name of reports requested by a user
# A wait fails 30 s after its report, and torchrun waits 30 s more for a rank that has been stopped.
_RECENT_SECONDS = 120.0


def summaries(folder: Path) -> set[Path]:
    """Returns the one-line summaries that watchdogs wrote in a run's folder."""
    return set((folder / HANGS).glob(f"*/{SUMMARY_FILE}"))


def reason_for_failure(folder: Path, *, known: set[Path]) -> str | None:
    """Returns a watchdog's recent summary of a failed job; None if there is none.

    known: the summaries from before the job. Old ones and ones requested by a user do not count.
    """
    written = [p for p in summaries(folder) - known if not p.parent.name.endswith(ASKED)]
    newest = max(written, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None or time.time() - newest.stat().st_mtime > _RECENT_SECONDS:
        return None
    return newest.read_text(encoding="utf-8").strip()
