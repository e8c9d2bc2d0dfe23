"""The console on which commands print, and their tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import rich.console
from rich.padding import PaddingDimensions
from rich.table import Table
from rich.text import Text

from axonn_ext.spec.files.errors import printable

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

_MOST_COLUMNS = 10_000  # wider than any table, in characters


class Console(rich.console.Console):
    """A rich console that prints text without markup, since file names may look like it.

    When nobody reads the output any more, it raises BrokenPipeError, so that the command decides
    what to do.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Renders any text for rich, so that no file's text can control the terminal."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """Called by rich for a BrokenPipeError; by default, rich ends the process with status 1."""
        raise


def say(console: rich.console.Console, text: str, style: str = "") -> None:
    """Prints a line as it is, whatever its length; a terminal wraps it itself."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def plain_table(*, padding: PaddingDimensions = (0, 2)) -> Table:
    """Returns a table without lines, to which the caller adds columns."""
    return Table(box=None, header_style="bold", pad_edge=False, padding=padding)


def new_table(heads: Sequence[str], left: Collection[str] = (), *, gap: int = 2) -> Table:
    """Returns a table without lines, with a column of text or numbers for each head.

    left: heads of the columns of text; by default, the first. gap: spaces between columns
    """
    table = plain_table(padding=(0, gap, 0, 0))
    for head in heads:
        is_text = head in (left or heads[:1])
        table.add_column(head, justify="left" if is_text else "right", no_wrap=True)
    return table


def print_table(console: rich.console.Console, table: Table) -> None:
    """Prints a table without truncating or wrapping its cells.

    rich would print 80 columns into a file or a pipe, and would truncate numbers. A terminal that
    is narrower than the table wraps the lines itself.
    """
    options = console.options.update_width(_MOST_COLUMNS)
    needed = console.measure(table, options=options).maximum
    table.width = needed if needed > console.width else None
    console.print(table, highlight=False, markup=False, crop=False)


class Bar:
    """A progress bar on a terminal, from the first `show`; elsewhere it shows nothing.

    columns: texts and times after the count. auto_refresh: a thread draws the bar; otherwise it is
    drawn only when it changes, so that drawing does not disturb a measurement
    """

    def __init__(
        self, console: rich.console.Console, total: int, *columns: str | ProgressColumn,
        shown: bool = True, auto_refresh: bool = True,
    ) -> None:  # fmt: skip
        self._progress: Progress | None = None
        if shown and console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress

            self._progress = Progress(
                "{task.description}", BarColumn(), MofNCompleteColumn(), *columns,
                console=console, transient=True, auto_refresh=auto_refresh,
            )  # fmt: skip
            self._task = self._progress.add_task("", total=total)

    def show(self, text: str) -> None:
        """Shows the bar with this text before it."""
        if self._progress is not None:
            self._progress.start()
            self._progress.update(self._task, description=text, refresh=True)

    def advance(self, count: int = 1) -> None:
        if self._progress is not None:
            self._progress.update(self._task, advance=count, refresh=True)

    def close(self) -> None:
        """Removes the bar until the next `show`."""
        if self._progress is not None:
            self._progress.stop()
