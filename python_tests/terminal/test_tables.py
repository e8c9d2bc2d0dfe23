"""Tables and bars of commands on a narrow terminal, or in a pipe, where rich assumes 80 columns."""

from __future__ import annotations

import io
from contextlib import closing

import pytest
from rich.console import Console

from axonn_ext.bench.train import report
from axonn_ext.bench.train.plan import SINGLE, MemoryUse, Row
from axonn_ext.terminal.console import Bar, plain_table, print_table


@pytest.mark.parametrize("columns", [20, 80, 400])
@pytest.mark.parametrize("no_wrap", [False, True])
def test_no_cell_is_cut_or_broken(columns: int, no_wrap: bool) -> None:
    table = plain_table()
    headers = [f"column {i}" for i in range(12)]
    for header in headers:
        table.add_column(header, justify="right", no_wrap=no_wrap)
    cells = [f"{10**i:,} MiB" for i in range(12)]
    table.add_row(*cells)
    file = io.StringIO()
    print_table(Console(file=file, width=columns), table)
    heads, row = file.getvalue().splitlines()
    assert [part.strip() for part in heads.split("    ") if part.strip()] == headers
    assert [part.strip() for part in row.split("    ") if part.strip()] == cells


def test_bench_train_shows_whole_numbers_in_a_pipe() -> None:
    row = Row(
        "ours x=16,y=16,z=16", SINGLE, None, num_ranks=1, num_threads=128, batch_size=1024,
        loss_error=1e-7, norm_error=1e-7, median_ms=1234567.0, min_ms=1.0, spread_ms=234567.0,
        rounds=5, tokens_per_s=12345678.0, ratio_to_single=1.0,
        memory=MemoryUse(peak_bytes=92900 << 20, shared_bytes=12900 << 20),
    )  # fmt: skip
    file = io.StringIO()
    report.print_rows(Console(file=file, width=80), [row], cores=128)
    _, line, *_ = file.getvalue().splitlines()
    for cell in (
        "ours x=16,y=16,z=16", "1 x 128 threads", "1024", "12,345,678", "1,234,567", "234,567",
        "1.00", "92,900 MiB", "12,900 MiB", "1e-07",
    ):  # fmt: skip
        assert cell in line


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_is_drawn_only_on_a_terminal(terminal: bool) -> None:
    file = io.StringIO()
    with closing(Bar(Console(file=file, force_terminal=terminal, width=80), 2)) as bar:
        bar.show("first")
        bar.advance()
        bar.show("second")
    shown = file.getvalue()
    assert bool(shown) == terminal
    assert all(text in shown for text in ("first", "second", "1/2")) == terminal
