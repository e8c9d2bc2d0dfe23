"""Where commands print, and their tables."""

from __future__ import annotations

import rich.console
from rich.padding import PaddingDimensions
from rich.table import Table

_MOST_COLUMNS = 10_000  # more than any table has


class Console(rich.console.Console):
    """rich's, which prints texts as they are (names of files may look like its markup), and leaves
    it to the command what to do when nobody reads any more."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """rich calls this while it handles a BrokenPipeError, and would end the process with 1."""
        raise


def plain_table(*, padding: PaddingDimensions = (0, 2)) -> Table:
    """A table without lines, whose columns are still to be added."""
    return Table(box=None, header_style="bold", pad_edge=False, padding=padding)


def print_table(console: rich.console.Console, table: Table) -> None:
    """Prints a table whose cells are neither cut nor broken into lines.

    A file or a pipe has 80 columns for rich, and numbers would be cut short. Where a terminal is
    narrower than the table, it breaks the lines.
    """
    options = console.options.update_width(_MOST_COLUMNS)
    needed = console.measure(table, options=options).maximum
    table.width = needed if needed > console.width else None
    console.print(table, highlight=False, markup=False, crop=False)
