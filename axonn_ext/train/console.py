"""Where commands print."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """rich's, which prints texts as they are (names of files may look like its markup), and leaves
    it to the command what to do when nobody reads any more."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """rich calls this while it handles a BrokenPipeError, and would end the process with 1."""
        raise
