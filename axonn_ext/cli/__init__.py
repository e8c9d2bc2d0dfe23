"""The command line: `axonn-ext`, and `python -m axonn_ext`."""

from __future__ import annotations

from axonn_ext.cli.main import main

__all__ = ["main"]
