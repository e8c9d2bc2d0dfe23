"""Where watchdogs write, and what others read of it. It loads no Torch."""

from __future__ import annotations

import signal
import time
from pathlib import Path

SIGNAL = signal.SIGUSR2  # asks for reports
HANGS = "hangs"  # the folder of reports, in a run's folder
SUMMARY_FILE = "summary.txt"
ASKED = "-asked"  # the name of reports that a user asked for ends so
# A wait fails 30 s after its report, and torchrun waits 30 s more for a rank that has been stopped.
_RECENT_SECONDS = 120.0


def summaries(folder: Path) -> set[Path]:
    """Returns the one-line summaries that watchdogs wrote in a run's folder."""
    return set((folder / HANGS).glob(f"*/{SUMMARY_FILE}"))


def reason_for_failure(folder: Path, *, known: set[Path]) -> str | None:
    """Returns what a watchdog has just said of a job that failed; None if it has said nothing.

    known: the summaries that were there before the job. One that a user asked for, or that is old,
    is no reason.
    """
    written = [p for p in summaries(folder) - known if not p.parent.name.endswith(ASKED)]
    newest = max(written, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None or time.time() - newest.stat().st_mtime > _RECENT_SECONDS:
        return None
    return newest.read_text(encoding="utf-8").strip()
