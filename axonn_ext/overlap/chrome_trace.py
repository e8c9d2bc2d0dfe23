"""Writes a Chrome trace (chrome://tracing, Perfetto) of computation and communication."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from axonn_ext import _C

_MICRO = 1e6


@dataclass(frozen=True)
class Span:
    """An activity of the program, with its times in seconds of `_C.Lanes.now`."""

    name: str
    begin: float
    end: float
    details: Mapping[str, float] = field(default_factory=dict)


def write_chrome_trace(
    path: Path, *, compute: Iterable[Span], lanes: Mapping[str, Iterable[_C.LaneTask]]
) -> None:
    """Writes `compute` as the first row and two rows for each axis.

    The first row of an axis shows its collectives, the second the program's waits for them.
    """
    spans = list(compute)
    origin = min((span.begin for span in spans), default=0.0)
    rows = {"compute": spans}
    for axis, tasks in lanes.items():
        carried = list(tasks)
        rows[f"axis {axis}"] = [_span_of(task) for task in carried]
        rows[f"waiting for {axis}"] = [
            Span(task.name, task.waited_from, task.waited_to) for task in carried
        ]
    events: list[dict[str, object]] = []
    for row, (name, content) in enumerate(rows.items()):
        place = {"pid": 0, "tid": row}
        events.append({"ph": "M", "name": "thread_name", "args": {"name": name}, **place})
        events.append(
            {"ph": "M", "name": "thread_sort_index", "args": {"sort_index": row}, **place}
        )
        for span in sorted(content, key=lambda s: s.begin):
            begin, length = span.begin - origin, span.end - span.begin
            event = {"ph": "X", "name": span.name, "ts": begin * _MICRO, "dur": length * _MICRO}
            events.append({**event, "args": dict(span.details), **place})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _span_of(task: _C.LaneTask) -> Span:
    details = {
        "number": task.sequence,
        "bytes": task.bytes,
        "queued_ms": (task.started - task.submitted) * 1e3,
        "exposed_ms": (task.waited_to - task.waited_from) * 1e3,
    }
    return Span(task.name, task.started, task.finished, details)
