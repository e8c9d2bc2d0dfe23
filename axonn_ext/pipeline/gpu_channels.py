"""One-way connections between the GPUs of neighbouring stages, over NCCL.

Each has a communicator of two ranks that carries nothing else, so that no message waits for another
one. NCCL connects the ranks of a communicator when it is made or at its first transfer, in which
all of them must take part; so all are connected before the message threads start, in an order free
of deadlocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from axonn_ext.pipeline.failures import Failures
from axonn_ext.pipeline.gpu import Gpu
from axonn_ext.pipeline.messages import DIRECTIONS, FORWARD, Form
from axonn_ext.ranks.grid import AxisGroup
from axonn_ext.ranks.side_groups import SideGroups

_T = TypeVar("_T")


class GpuChannel:
    """A one-way connection with a neighbour: this rank sends all messages or receives all.

    Transfers run on a separate stream.
    """

    def __init__(self, group: ProcessGroup, gpu: Gpu) -> None:
        self._group, self._gpu = group, gpu
        self._peer = 1 - dist.get_rank(group)
        self._stream = gpu.cuda.Stream(gpu.device)
        self._is_aborted = False

    def laid_out(self, tensor: Tensor) -> Tensor:
        """Returns the tensor, whose values must be computed, in the form NCCL sends: contiguous."""
        with self._gpu.cuda.stream(self._stream):
            return tensor.contiguous()

    def buffer(self, form: Form) -> Tensor:
        """Returns memory for an incoming message; it belongs to the channel's stream."""
        with self._gpu.cuda.stream(self._stream):
            return torch.empty(form.shape, dtype=form.dtype, device=self._gpu.device)

    def send(self, tensor: Tensor) -> None:
        """Returns when the neighbour has received the tensor, which must come from `laid_out`.

        Raises RuntimeError if it cannot be sent, or after `abort`.
        """
        self._transfer(tensor, sends=True)

    def receive(self, buffer: Tensor) -> None:
        """Returns when the neighbour's message is in the buffer.

        Raises RuntimeError if it cannot be received, or after `abort`.
        """
        self._transfer(buffer, sends=False)

    def connect(self, *, sends: bool) -> None:
        """Makes NCCL connect both ranks, by sending one number. Waits for the neighbour."""
        with self._gpu.cuda.stream(self._stream):
            number = torch.zeros(1, device=self._gpu.device)
        self._transfer(number, sends=sends)

    def abort(self) -> None:
        """Ends a transfer that would never end by itself, since the neighbour has failed."""
        self._is_aborted = True
        self._gpu.abort(self._group)

    def _transfer(self, tensor: Tensor, *, sends: bool) -> None:
        """Transfers a tensor between GPUs; returns when it is done.

        Nothing is allocated here, since that may wait for all work on the GPU.
        """
        self._check()
        with self._gpu.cuda.stream(self._stream):
            if tensor.numel():
                transfer = dist.isend if sends else dist.irecv
                peer = {"group_dst" if sends else "group_src": self._peer}
                self._gpu.follow(transfer(tensor, group=self._group, **peer))
            end = self._gpu.mark()
        end.synchronize()
        self._check()

    def _check(self) -> None:
        if self._is_aborted:
            raise RuntimeError("the connection was ended")


def connect(
    stages: AxisGroup, groups: SideGroups, gpu: Gpu, failures: Failures, *, wraps: bool
) -> Mapping[tuple[str, int], GpuChannel]:
    """Returns the channels of this rank, by direction and sending stage.

    wraps: whether the last stage and the first one are neighbours, too. Collective over all ranks:
    each meets the stages of its own axis, then all pass a barrier. Raises the error of this rank;
    PipelineError if another one fails or does not take part.
    """
    ranks = dist.get_process_group_ranks(stages.process_group)
    try:
        found = _connect(list(steps(stages.rank, ranks, wraps=wraps)), groups, gpu, failures)
        # The collectives that follow do not look for failures; all must have come this far.
        everyone = dist.barrier(group=groups.get("totals"), async_op=True)
        failures.wait_for(everyone, "the connection of all GPUs")
    except Exception as error:
        groups.forget()
        failures.tell(f"rank {dist.get_rank()}, the connections of its GPU: {error}")
        raise
    return found


@dataclass(frozen=True)
class Step:
    """A rank's step in a round and direction: it makes a group, and a channel if that is used.

    ranks: of the group. source: the sending stage; `sends` says whether it is this one.
    """

    what: str
    direction: str
    ranks: list[int]
    source: int
    sends: bool
    is_used: bool


def steps(stage: int, ranks: Sequence[int], *, wraps: bool) -> Iterator[Step]:
    """Yields the steps of a stage, in an order in which stages cannot deadlock.

    ranks: of all stages.

    All go through the rounds in the same order, and each meets at most one other per round and
    direction. So among the waiting stages, the two that are least advanced are at the same channel.

    A stage that meets nobody makes a group of one: c10d names a group after the number of groups a
    rank has made (see SideGroups); and with `init_process_group(device_id=...)` it splits each one
    off the communicator of all ranks, in which all of them must take part.
    """
    for number, firsts in enumerate(rounds(len(ranks))):
        pairs = [(first, (first + 1) % len(ranks)) for first in firsts]
        pair = next((p for p in pairs if stage in p), None)
        for direction in DIRECTIONS:
            if pair is None:
                what = f"no messages {direction}, round {number}"
                yield Step(what, direction, [ranks[stage]], stage, False, False)
                continue
            source, to = pair if direction == FORWARD else pair[::-1]
            what = f"messages {direction} from stage {source} to {to}"
            both, is_used = sorted(ranks[n] for n in pair), wraps or pair[0] < pair[1]
            yield Step(what, direction, both, source, source == stage, is_used)


def _connect(
    todo: Sequence[Step], groups: SideGroups, gpu: Gpu, failures: Failures
) -> dict[tuple[str, int], GpuChannel]:
    # All groups first: if a connection fails, all ranks have still made the same number of groups.
    made = []
    for step in todo:
        get = partial(groups.get, step.what, step.ranks, backend=gpu.backend)
        made.append(_waiting_beside(get, gpu, failures, f"the group for {step.what}"))
    found = {}
    for step, group in zip(todo, made, strict=True):
        if step.is_used:
            channel = found[step.direction, step.source] = GpuChannel(group, gpu)
            meet = partial(channel.connect, sends=step.sends)
            _waiting_beside(meet, gpu, failures, f"the connection for {step.what}")
    return found


def _waiting_beside(make: Callable[[], _T], gpu: Gpu, failures: Failures, what: str) -> _T:
    """Runs `make` in a separate thread; returns its result or raises its error.

    NCCL waits for the neighbour without a limit, even if that one has failed; this thread does not.
    Raises PipelineError as `Failures.wait` does; the other thread is then left waiting.
    """
    made: Future[_T] = Future()

    def run() -> None:
        try:
            gpu.cuda.set_device(gpu.device)
            made.set_result(make())
        except BaseException as error:  # raised in the waiting thread
            made.set_exception(error)

    threading.Thread(target=run, daemon=True, name="axonn connection").start()
    what = f"{what} was not made"
    failures.wait(lambda seconds: bool(wait([made], seconds).done), what, waits=2)
    return made.result()


def rounds(size: int) -> list[list[int]]:
    """Returns the pairs of neighbours in a ring, in rounds, by the first stage of each pair.

    In a round no stage is in two pairs, so all pairs can meet at once. An odd ring takes three
    rounds.
    """
    even, odd, last = list(range(0, size - 1, 2)), list(range(1, size - 1, 2)), [size - 1]
    return [even, odd, last] if size % 2 else [even, odd + last]
