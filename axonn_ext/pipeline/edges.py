"""One-way connections between the GPUs of neighbouring stages, over NCCL.

Each has a communicator of two ranks, in which nothing else is sent, so that no message waits for
another one. NCCL makes a communicator at its first transfer, for which both ranks must be there; so
all are made before the threads of messages start, in an order in which no rank waits for one that
waits for it. Nothing here has run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from axonn_ext.grid import AxisGroup
from axonn_ext.pipeline.failures import Failures
from axonn_ext.pipeline.gpu import Gpu, passed
from axonn_ext.pipeline.messages import DIRECTIONS, FORWARD, Form
from axonn_ext.side_groups import SideGroups


class Edge:
    """A connection with one neighbour, of which this rank sends all messages or receives all.

    Transfers run on a stream of their own.
    """

    def __init__(self, group: ProcessGroup, gpu: Gpu) -> None:
        self._group, self._gpu = group, gpu
        self._peer = 1 - dist.get_rank(group)
        self._stream = gpu.cuda.Stream(gpu.device)
        self._is_aborted = False

    def send(self, tensor: Tensor) -> None:
        """Returns when the neighbour has the tensor, whose values must be there.

        Raises RuntimeError if it cannot be sent, or after `abort`.
        """
        with self._gpu.cuda.stream(self._stream):
            self._start(tensor.contiguous(), sends=True).synchronize()
        self._check()

    def receive(self, form: Form) -> Tensor:
        """Returns what the neighbour sends, when it is there; it belongs to the edge's stream.

        Raises RuntimeError if it cannot be received, or after `abort`.
        """
        with self._gpu.cuda.stream(self._stream):
            tensor = torch.empty(form.shape, dtype=form.dtype, device=self._gpu.device)
            self._start(tensor, sends=False).synchronize()
        self._check()
        return tensor

    def connect(self, failures: Failures, *, sends: bool, what: str) -> None:
        """Lets NCCL connect both ranks, by sending one number. Raises PipelineError if it fails."""
        with self._gpu.cuda.stream(self._stream):
            number = torch.zeros(1, device=self._gpu.device)
            done = self._start(number, sends=sends)
        failures.wait(lambda seconds: passed(done, seconds), f"{what} was not made", waits=2)

    def abort(self) -> None:
        """Ends a transfer that does not end by itself, since the neighbour has failed."""
        self._is_aborted = True
        self._gpu.abort(self._group)

    def _start(self, tensor: Tensor, *, sends: bool) -> torch.Event:
        """Starts a transfer on the current stream; returns the event of its end."""
        self._check()
        if tensor.numel():
            transfer = dist.isend if sends else dist.irecv
            peer = {"group_dst" if sends else "group_src": self._peer}
            self._gpu.follow(transfer(tensor, group=self._group, **peer))
        return self._gpu.mark()

    def _check(self) -> None:
        if self._is_aborted:
            raise RuntimeError("the connection was ended")


def connect(
    stages: AxisGroup, groups: SideGroups, gpu: Gpu, failures: Failures, *, wraps: bool
) -> Mapping[tuple[str, int], Edge]:
    """Returns the edges of this rank, by direction and the stage that sends.

    wraps: whether the last stage and the first one are neighbours, too. Raises PipelineError or
    RuntimeError if a rank does not take part. Collective over the axis: in each round a stage meets
    at most one neighbour, first in the one direction, then in the other. All go through the rounds
    in their order, so among the edges that are not made yet both ranks of the first one are at it.
    """
    try:
        return _connect(stages, groups, gpu, failures, wraps=wraps)
    except RuntimeError as error:
        failures.tell(f"rank {dist.get_rank()}, the connections of its GPU: {error}")
        raise


def _connect(
    stages: AxisGroup, groups: SideGroups, gpu: Gpu, failures: Failures, *, wraps: bool
) -> Mapping[tuple[str, int], Edge]:
    found, ranks = {}, dist.get_process_group_ranks(stages.process_group)
    for number, firsts in enumerate(rounds(stages.size)):
        pairs = [(first, (first + 1) % stages.size) for first in firsts]
        pair = next((p for p in pairs if stages.rank in p), None)
        for direction in DIRECTIONS:
            # All make as many groups, whether they need them or not: see SideGroups.
            if pair is None:
                alone = f"no messages {direction}, round {number}"
                groups.get(alone, [ranks[stages.rank]], backend=gpu.backend)
                continue
            source, to = pair if direction == FORWARD else pair[::-1]
            what = f"messages {direction} from stage {source} to {to}"
            group = groups.get(what, sorted(ranks[n] for n in pair), backend=gpu.backend)
            if wraps or pair[0] < pair[1]:
                edge = found[direction, source] = Edge(group, gpu)
                what = f"the connection for {what}"
                edge.connect(failures, sends=source == stages.rank, what=what)
    return found


def rounds(size: int) -> list[list[int]]:
    """Returns the pairs of neighbours in a ring in rounds, by the first stage of each.

    In a round no stage is in two pairs, so that all meet at once. An odd number takes three rounds.
    """
    even, odd, last = list(range(0, size - 1, 2)), list(range(1, size - 1, 2)), [size - 1]
    return [even, odd, last] if size % 2 else [even, odd + last]
