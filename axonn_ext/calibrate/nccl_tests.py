"""Reads the logs of nccl-tests and rccl-tests: bandwidth and latency of the links of a cluster."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from pathlib import Path

from axonn_ext.calibrate.file import LinkRow
from axonn_ext.calibrate.fit import Point, fit, ring_steps
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.files.files import read_text

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
# How much the bus bandwidth of a log may differ from the one its sizes and times give. The log
# rounds both to a few digits; another collective or another number of ranks is off by more.
_MISFIT = 0.05
_LEAST_LATENCY_S = 1e-9  # a machine's file must not have zeros


def read_log(path: Path, kind: str) -> tuple[LinkRow, int]:
    """Returns the link that a log measured, and the total number of its ranks.

    kind: the collective of the log. The out-of-place times count. Of a message of `size` bytes, a
    rank in a group of g ranks sends (g - 1) / g, and twice that for all_reduce, as nccl-tests
    define it (doc/PERFORMANCE.md in github.com/NVIDIA/nccl-tests). If the ranks are split into
    groups (NCCL_TESTS_SPLIT), all groups communicate at once.

    Raises InputError for a log without ranks or times, for groups that are not alike, and for
    bandwidths that do not fit sizes and times, because the log is of another collective.
    """
    lines = read_text(path).splitlines()
    inner, size, num_ranks = _groups(lines, path)
    passes = 2 if kind == "all_reduce" else 1
    points: dict[int, tuple[Point, float]] = {}
    for num_bytes, seconds, bus_rate in _rows(lines, path):
        sent = passes * num_bytes * (size - 1) // size
        if sent and seconds > 0:
            points.setdefault(sent, (Point(sent, seconds, 0.0), bus_rate))
    if len(points) < 3:
        raise InputError(
            f"{path}: expected the times of at least three sizes, got {len(points)}; run it with "
            "-b 1K -e 8G -f 2"
        )
    largest, bus_rate = points[max(points)]
    rate = largest.num_bytes / largest.seconds
    if abs(bus_rate / rate - 1) > _MISFIT:
        raise InputError(
            f"{path}: a bus bandwidth of {bus_rate / 1e9:.2f} GB/s does not fit {kind} of {size} "
            f"ranks, for which sizes and times give {rate / 1e9:.2f} GB/s; is it another one's log?"
        )
    line = fit([point for point, _ in points.values()])
    latency = max(line.latency_s / ring_steps(kind, size), _LEAST_LATENCY_S)
    return LinkRow(None, inner, size, kind, line, latency, 0.0), num_ranks


def _groups(lines: list[str], path: Path) -> tuple[int, int, int]:
    """Returns the distance of neighbours in a group, and the number of ranks of one and of all."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for line in lines:
        match = re.match(r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s", line)
        if match is not None:
            groups[int(match[2] or 0)].append(int(match[1]))
    ranks = sorted(itertools.chain.from_iterable(groups.values()))
    if len(ranks) < 2 or ranks != list(range(len(ranks))):
        raise InputError(
            f'{path}: expected lines "# Rank 0 Group 0 Pid ... on HOST device ..." of two or more '
            f"ranks, got {len(ranks)}"
        )
    steps = {b - a for g in groups.values() for a, b in itertools.pairwise(sorted(g))}
    sizes = {len(group) for group in groups.values()}
    if len(steps) != 1 or len(sizes) != 1:
        raise InputError(
            f"{path}: expected groups of equally many ranks at equal distances, got sizes "
            f"{sorted(sizes)} and distances {sorted(steps)}"
        )
    return steps.pop(), sizes.pop(), len(ranks)


def _rows(lines: list[str], path: Path) -> list[tuple[int, float, float]]:
    """Returns bytes, seconds and bus bandwidth in bytes per second for each line of the table."""
    heads = [i for i, line in enumerate(lines) if re.match(r"#\s+size\s+count\s", line)]
    if not heads or "(us)" not in "".join(lines[heads[0] + 1 : heads[0] + 2]):
        raise InputError(f'{path}: expected a table with "# size count ..." and times in us')
    columns = lines[heads[0]].lstrip("# ").split()
    time, bus = columns.index("time"), columns.index("busbw")
    rows = []
    for line in lines[heads[0] :]:
        cells = line.split()
        if len(cells) <= bus or not cells[0].isdecimal():
            continue
        try:
            row = int(cells[0]), float(cells[time]) * 1e-6, float(cells[bus]) * 1e9
        except ValueError:
            raise InputError(f"{path}: expected numbers, got {line.strip()!r}") from None
        rows.append(row)
    return rows
