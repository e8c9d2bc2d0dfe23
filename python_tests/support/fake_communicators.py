"""Substitutes for the compiled NCCL communicators that run collectives on c10d's groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


@dataclass
class FakeWork:
    work: dist.Work
    look: Callable[[str], None]

    def wait(self) -> None:
        self.look("wait")
        self.work.wait()


@dataclass
class FakeCommunicator:
    """Calls `look` with the name of each call, and asserts what the compiled class requires.

    Its c10d calls do not appear in traces, just like those of the compiled class.
    """

    group: dist.ProcessGroup
    look: Callable[[str], None]

    def all_gather(self, output: Tensor, input: Tensor) -> FakeWork:
        assert output.is_contiguous() and input.is_contiguous() and output.dtype == input.dtype
        assert output.numel() == input.numel() * self.group.size()
        self.look("all_gather")
        with _disable_current_modes():
            return FakeWork(self.group._allgather_base(output, input), self.look)

    def all_to_all(self, output: Tensor, input: Tensor) -> FakeWork:
        assert output.is_contiguous() and input.is_contiguous() and output.dtype == input.dtype
        assert output.numel() == input.numel() and input.numel() % self.group.size() == 0
        assert output.data_ptr() != input.data_ptr()
        self.look("all_to_all")
        with _disable_current_modes():
            return FakeWork(self.group.alltoall_base(output, input, [], []), self.look)

    def all_reduce(self, output: Tensor, input: Tensor) -> FakeWork:
        assert output.is_contiguous() and input.is_contiguous() and output.dtype == input.dtype
        assert output.numel() == input.numel()
        self.look("all_reduce")
        output.copy_(input)
        with _disable_current_modes():
            return FakeWork(self.group.allreduce([output]), self.look)


@dataclass
class FakeCommunicators:
    """The communicators of the groups, by axis. failure: if set, every call raises this error."""

    groups: dict[str, dist.ProcessGroup]
    look: Callable[[str], None] = lambda call: None
    failure: str = ""

    def axis(self, name: str) -> FakeCommunicator:
        def look(call: str) -> None:
            if call != "wait":  # making a stream wait cannot fail
                self.check()
            self.look(call)

        return FakeCommunicator(self.groups[name], look)

    def check(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)


@dataclass
class FakeLibrary:
    """The compiled module: its NCCL version, and the arguments of its communicators."""

    nccl: str = "2.27.3"
    made: list[tuple[str, Sequence[Any], dict[str, Any]]] = field(default_factory=list)
    closed: int = 0

    def build_info(self) -> dict[str, str]:
        return {"nccl": self.nccl}

    def CommunicatorGrid(self, group_name: str, axes: Sequence[Any], **options: Any) -> FakeLibrary:
        self.made.append((group_name, axes, options))
        return self

    def close(self) -> None:
        self.closed += 1
