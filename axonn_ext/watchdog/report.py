"""What one rank knows about itself while a job hangs."""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
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
from axonn_ext.inputs.errors import clipped
from axonn_ext.overlap import Orchestrator
from axonn_ext.overlap.watch import GROUP_PREFIX

# A place in these folders says less about a program than the place that called it.
_LIBRARIES = (sysconfig.get_paths()["stdlib"], os.path.dirname(torch.__file__))


@dataclass(frozen=True)
class Waiting:
    """A wait that is under way. Ranks are those of the job.

    group: distinguishes groups of the same axis, and the calls of ops from those of an
    orchestrator. ranks: of the group. number: of the call in the group, equal on all its ranks; 0
    if it has none. peers: whom the rank waits for, and what: what they may not have done.
    """

    group: str
    axis: str
    ranks: tuple[int, ...]
    call: str
    number: int
    peers: tuple[int, ...]
    what: str
    seconds: float

    @property
    def where(self) -> str:
        """The op with its axis, for a line of text. Operands, such as "a=[4,4]", are left out."""
        op = self.call.partition(" ")[0] if "=" in self.call else self.call
        number = f", call {self.number:,}" if self.number else ", a call"
        return f"{clipped(op)}{number} of {axis_and_ranks(self.axis, self.ranks)}"

    @property
    def in_background(self) -> bool:
        """Whether a peer has done its part once it has issued the call, without waiting for it."""
        return in_background(self.group)

    def is_same_call(self, other: Waiting) -> bool:
        """Whether a rank of the same group waits in the same call."""
        mine, theirs = (self.group, self.ranks), (other.group, other.ranks)
        return mine == theirs and self.number == other.number and self.call == other.call


@dataclass(frozen=True)
class Progress:
    """How many calls a rank has begun in a group, and the last of them."""

    group: str
    axis: str
    ranks: tuple[int, ...]
    num_calls: int
    last: str


@dataclass(frozen=True)
class Report:
    """What a rank waits for, how far it is, and where its main thread is."""

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
    def from_json(cls, text: str | bytes) -> Report:
        values = json.loads(text)
        values["waits"] = tuple(Waiting(**_with_tuples(wait)) for wait in values["waits"])
        values["progress"] = tuple(Progress(**_with_tuples(p)) for p in values["progress"])
        return cls(**values)

    def text(self) -> str:
        """The report for people, without the stacks."""
        lines = [f"rank {self.rank}, host {self.host}, process {self.pid}", f"at {self.place}", ""]
        for wait in self.waits:
            peers = ", ".join(map(str, wait.peers))
            lines += [
                f"waits for rank {peers}, which {wait.what}, since {wait.seconds:.1f} s",
                f"    in {wait.where}",
                f"    {wait.call}",
            ]
        if not self.waits:
            lines.append("waits for no rank")
        for group in self.progress:
            kind = "collectives of an orchestrator" if in_background(group.group) else "calls"
            lines.append(
                f"{axis_and_ranks(group.axis, group.ranks)}: {group.num_calls:,} {kind}, the last "
                f"{group.last}"
            )
        return "\n".join(lines) + "\n"


def in_background(group: str) -> bool:
    """Whether a group's name stands for the collectives that an orchestrator issues in it."""
    return group.startswith(GROUP_PREFIX)


def axis_and_ranks(axis: str, ranks: Sequence[int]) -> str:
    """Names an axis and the ranks of a group along it."""
    return f"axis {axis} (ranks {', '.join(map(str, ranks))})" if ranks else f"axis {axis}"


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
                Progress(c.group, _axis(c.axis), ranks_of(c.group), c.num_calls, c.last)
                for c in calls
            ),
            *(
                Progress(group, axis, ranks_of(group), num_calls, last)
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
    """Returns the ranks of the c10d group of that name; none if it has been destroyed."""
    name = group.removeprefix(GROUP_PREFIX)
    try:
        found = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        return tuple(dist.get_process_group_ranks(found))
    except (RuntimeError, KeyError, ValueError):
        return ()


def _waiting(wait: _C.Wait) -> Waiting:
    ranks = ranks_of(wait.group)
    peers = tuple(ranks[peer] for peer in wait.peers) if ranks else tuple(wait.peers)
    return Waiting(
        wait.group, _axis(wait.axis), ranks, wait.call, wait.number, peers, wait.what, wait.seconds
    )


def _axis(label: str) -> str:
    """Returns the axis that a group's name begins with, if it is a group of a Grid."""
    return label.partition(" (ranks ")[0]


def _place(frame: FrameType | None) -> str:
    """Names the innermost place of a stack that is not in Python's library or Torch's."""
    if frame is None:
        return "an unknown place"
    inner = frame
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = inner
    name = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
