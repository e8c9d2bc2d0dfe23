"""Makes the machine file that the planner reads (docs/planner.md) from measurements."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from axonn_ext.calibrate.fit import Line, Point, fit, ring_steps

Json = Mapping[str, Any]

_LEAST_LATENCY_S = 1e-9  # the file must not have zeros


class LinkRow(NamedTuple):
    """Bandwidth and latency of one kind of collective in the groups of an axis (None: of any).

    latency_s: the latency of one step of the ring. spread: the largest interquartile range of a
    message's times, relative to their median.
    """

    axis: str | None
    inner: int
    size: int
    kind: str
    line: Line
    latency_s: float
    spread: float


def link_rows(measured: Json) -> list[LinkRow]:
    """Returns the fits of all groups, in the order in which they were measured."""
    rows = []
    for row in measured["links"]:
        points = [Point(*values) for values in row["points"]]
        line = fit(points)
        latency = line.latency_s / ring_steps(row["kind"], row["size"])
        group = row["axis"], row["inner"], row["size"], row["kind"]
        spread = max(p.spread_s / p.seconds for p in points)
        rows.append(LinkRow(*group, line, max(latency, _LEAST_LATENCY_S), spread))
    return rows


def peak_flops(measured: Json) -> dict[str, float]:
    """Returns the rate of a rank's fastest product, for each dtype."""
    peaks: dict[str, float] = {}
    for row in measured["products"]:
        rate = 2 * row["m"] * row["n"] * row["k"] / row["seconds"]
        peaks[row["dtype"]] = max(peaks.get(row["dtype"], 0.0), rate)
    return peaks


def machine_file(
    measured: Json,
    *,
    num_ranks: int,
    ranks_per_core: float,
    device: str,
    description: str,
    source: str,
) -> str:
    """Returns the text of the file.

    With one rank, which has no peers, links get the speed of memory. Links with rows for each axis
    are emulated: a collective sleeps until such a link would be done, which hides its own latency.
    """
    rows, peaks = link_rows(measured), peak_flops(measured)
    speed = measured["memory_bytes_per_s"]
    if rows:
        speed = statistics.median(row.line.bytes_per_s for row in rows)
    latency = statistics.median([row.latency_s for row in rows] or [_LEAST_LATENCY_S])
    lines = [
        f"description = {_text(description)}",
        f"source = {_text(source)}",
        "",
        f"device = {_text(device)}",
        f"memory_bytes = {measured['memory_bytes']}",
        f"memory_bytes_per_s = {measured['memory_bytes_per_s']:.4g}",
        f"launch_s = {measured['launch_s']:.4g}",
        *([f"ranks_per_core = {ranks_per_core:.4g}"] if ranks_per_core > 1 else []),
        "",
        *_table("peak_flops", peaks),
        "[matmul]",
        f"max_efficiency = {{ {', '.join(f'{dtype} = 1.0' for dtype in peaks)} }}",
        "",
        *_products(measured["products"]),
        *_table("attention", measured["attention"]),
        "[[levels]]",
        'name = "host"',
        f"ranks = {num_ranks}",
        f"bytes_per_s = {speed:.4g}",
        f"latency_s = {latency:.4g}",
        *(["hides_latency = true"] if any(row.axis is not None for row in rows) else []),
        "",
        *text_of_links(rows),
    ]
    return "\n".join(lines)


def _table(name: str, numbers: Mapping[str, float]) -> list[str]:
    return [f"[{name}]", *(f"{key} = {value:.4g}" for key, value in numbers.items()), ""]


def _products(rows: Sequence[Json]) -> Iterator[str]:
    for row in rows:
        yield "[[matmul.measured]]"
        yield f"dtype = {_text(row['dtype'])}"
        yield from (f"{key} = {row[key]}" for key in ("m", "n", "k"))
        yield f"layout = {_text(row['layout'])}"
        yield f"seconds = {row['seconds']:.4g}"
        yield ""


def text_of_links(rows: Sequence[LinkRow]) -> Iterator[str]:
    """Yields the lines of the tables `levels.measured` of a machine file."""
    for row in rows:
        yield "[[levels.measured]]"
        if row.axis is not None:
            yield f"axis = {_text(row.axis)}"
        yield f"inner = {row.inner}"
        yield f"size = {row.size}"
        yield f"kind = {_text(row.kind)}"
        yield f"bytes_per_s = {row.line.bytes_per_s:.4g}"
        yield f"latency_s = {row.latency_s:.4g}"
        yield ""


def _text(text: str) -> str:
    """Returns a TOML string; JSON makes it, since TOML has the same escapes."""
    return json.dumps(text)
