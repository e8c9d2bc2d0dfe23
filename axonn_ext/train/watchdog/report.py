"""One rank's report about itself while a job hangs."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from axonn_ext import _C
from axonn_ext.overlap import Orchestrator
from axonn_ext.overlap.watch import GROUP_PREFIX
from axonn_ext.ranks.grid import axis_of
from axonn_ext.spec.files.errors import clipped, first_of

_MOST_RANKS = 8  # in a line


@dataclass(frozen=True)
class Waiting:
    """A wait in progress. Ranks are numbered as in the job.

    group   the c10d name of the group, prefixed with GROUP_PREFIX if an orchestrator waits
    label   for display: "axis x", or the name of a group that no Grid made
    ranks   the ranks of the group
    call    the op, and the properties of it that ranks compare
    number  of the call in the group, equal on all its ranks; 0 if calls are not numbered
    peers   ranks of which at least one must act before the wait ends
    what    completes a sentence about these peers
    """

    group: str
    label: str
    ranks: tuple[int, ...]
    call: str
    number: int
    peers: tuple[int, ...]
    what: str
    seconds: float

    @property
    def where(self) -> str:
        """The op with its axis, for one line of text, without operands such as "a=[4,4]"."""
        op = self.call.partition(" ")[0] if "=" in self.call else self.call
        number = f", call {self.number:,}" if self.number else ", a call"
        return f"{clipped(op)}{number} of {with_ranks(self.label, self.ranks)}"

    @property
    def in_background(self) -> bool:
        """Whether a peer has done its part once it has issued the call without waiting."""
        return in_background(self.group)

    def is_same_call(self, other: Waiting) -> bool:
        """Whether a rank of the same group is known to wait in the same call."""
        mine = (self.group, self.ranks, self.number, self.call)
        return self.number > 0 and mine == (other.group, other.ranks, other.number, other.call)


@dataclass(frozen=True)
class Progress:
    """The number of calls that a rank has begun in a group, and the last of them."""

    group: str
    label: str
    ranks: tuple[int, ...]
    num_calls: int
    last: str


@dataclass(frozen=True)
class Report:
    """A rank's waits, its progress, and where its main thread is."""

    rank: int
    host: str
    pid: int
    place: str
    waits: tuple[Waiting, ...]
    progress: tuple[Progress, ...]

    @property
    def longest(self) -> Waiting | None:
        """The longest wait."""
        return max(self.waits, key=lambda wait: wait.seconds, default=None)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_ended(cls, rank: int, how: str) -> Report:
        """The report on behalf of a rank that has ended."""
        return cls(rank, "", 0, how, (), ())

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        values = json.loads(text)
        values["waits"] = tuple(Waiting(**_with_tuples(wait)) for wait in values["waits"])
        values["progress"] = tuple(Progress(**_with_tuples(p)) for p in values["progress"])
        return cls(**values)

    def text(self) -> str:
        """The report in readable form, without the stacks."""
        lines = [f"rank {self.rank}, host {self.host}, process {self.pid}", f"at {self.place}", ""]
        for wait in self.waits:
            lines += [
                f"waits for {name_ranks(wait.peers)}, which {wait.what}, for {wait.seconds:.1f} s",
                f"    in {wait.where}",
                f"    {wait.call}",
            ]
        if not self.waits:
            lines.append("waits for no rank")
        for group in self.progress:
            kind = "collectives of an orchestrator" if in_background(group.group) else "calls"
            last = f", the last {group.last}" if group.num_calls else ""
            lines.append(
                f"{with_ranks(group.label, group.ranks)}: {group.num_calls:,} {kind}{last}"
            )
        return "\n".join(lines) + "\n"


def in_background(group: str) -> bool:
    """Whether a group's name stands for the collectives that an orchestrator issues in a group."""
    return group.startswith(GROUP_PREFIX)


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns "rank 3" or "ranks 0, 1, 2"; long lists are shortened."""
    return f"rank{'' if len(ranks) == 1 else 's'} {first_of([*map(str, ranks)], _MOST_RANKS)}"


def with_ranks(label: str, ranks: Sequence[int]) -> str:
    """Names a group and its ranks."""
    return f"{label} ({name_ranks(ranks)})" if ranks else label


def take_report(rank: int, orchestrators: Iterable[Orchestrator] = ()) -> Report:
    """Returns the report of this process and its orchestrators. Any thread may call it."""
    calls = _C.group_progress()
    return Report(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        place=_place(sys._current_frames().get(threading.main_thread().ident or 0)),
        waits=tuple(_waiting(wait) for wait in _C.waits_under_way()),
        progress=(
            *(
                Progress(c.group, _label(c.axis), ranks_of(c.group), c.num_calls, c.last)
                for c in calls
            ),
            *(
                Progress(group, f"axis {axis}", ranks_of(group), num_calls, last)
                for orchestrator in orchestrators
                for axis, (group, num_calls, last) in orchestrator.progress().items()
            ),
        ),
    )


def stacks() -> str:
    """Returns the Python stack of each other thread of this process, the main thread's first."""
    own = threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if ident == own:
            continue
        parts.append(f"thread {names.get(ident, ident)}:\n")
        parts += traceback.format_stack(frame)
    return "".join(parts)


def ranks_of(group: str) -> tuple[int, ...]:
    """Returns the ranks of the c10d group with that name; none if it has been destroyed."""
    name = group.removeprefix(GROUP_PREFIX)
    try:
        found = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        return tuple(dist.get_process_group_ranks(found))
    except (RuntimeError, KeyError, ValueError):
        return ()


def _waiting(wait: _C.Wait) -> Waiting:
    ranks = ranks_of(wait.group)
    peers = tuple(ranks[peer] for peer in wait.peers) if ranks else ()
    label = f"axis {wait.axis}" if in_background(wait.group) else _label(wait.axis)
    return Waiting(wait.group, label, ranks, wait.call, wait.number, peers, wait.what, wait.seconds)


def _label(description: str) -> str:
    axis = axis_of(description)
    return f"group {description}" if axis is None else f"axis {axis}"


def _place(frame: FrameType | None) -> str:
    """Names the innermost place of a stack outside the standard library and installed packages.

    A place in a library says less about the program than its caller does.
    """
    inner = frame
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or inner
    if frame is None:
        return "an unknown place"
    name = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def _is_library(file: str) -> bool:
    import sysconfig  # loaded only for a report

    paths = sysconfig.get_paths()
    if file.startswith(("<frozen ", os.path.dirname(torch.__file__) + os.sep)):
        return True
    installed = (paths["purelib"] + os.sep, paths["platlib"] + os.sep)  # may lie in stdlib
    return file.startswith(paths["stdlib"] + os.sep) and not file.startswith(installed)


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
