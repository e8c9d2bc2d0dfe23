"""Where watchdogs write, and what others read of it. It loads no Torch."""

from __future__ import annotations

import signal
from pathlib import Path

SIGNAL = signal.SIGUSR2  # asks for reports
HANGS = "hangs"  # the folder of reports, in a run's folder
SUMMARY_FILE = "summary.txt"


def summaries(folder: Path) -> set[Path]:
    """Returns the one-line summaries that watchdogs wrote in a run's folder."""
    return set((folder / HANGS).glob(f"*/{SUMMARY_FILE}"))
