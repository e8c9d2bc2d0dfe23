"""Substitutes for the compiled NCCL communicators, whose collectives go over c10d's groups."""

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
    """Calls `look` with the name of each call, and refuses what the compiled class refuses.

    Traces do not see its calls of c10d, as they do not see what the compiled class does.
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
    """Of the groups by axis. failure: what every call raises once it is set."""

    groups: dict[str, dist.ProcessGroup]
    look: Callable[[str], None] = lambda call: None
    failure: str = ""

    def axis(self, name: str) -> FakeCommunicator:
        def look(call: str) -> None:
            if call != "wait":  # a stream can always be made to wait
                self.check()
            self.look(call)

        return FakeCommunicator(self.groups[name], look)

    def check(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)


@dataclass
class FakeLibrary:
    """The compiled module: its NCCL, and what its communicators were made with."""

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
