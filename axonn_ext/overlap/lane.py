"""A lane: the collectives of one axis, which start in program order and are waited for later."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from axonn_ext import _C
from axonn_ext.overlap.transport import Started, Transport
from axonn_ext.overlap.watch import CommunicationError, Watch
from axonn_ext.ranks.grid import AxisGroup

ORDER = "the order of collectives"


class Collective(ABC):
    """A started collective."""

    def __init__(self, signature: str, sequence: int, watch: Watch) -> None:
        self.signature = signature
        self.sequence = sequence
        self.retired = False  # whether it was waited for
        self._watch = watch

    @abstractmethod
    def wait(self) -> None:
        """Waits until the code that follows may read the results.

        It returns at once if the collective was waited for before.

        Raises: CommunicationError if the collective failed or takes longer than
            AXONN_TIMEOUT_SECONDS.
        """

    def failed(self, problem: str) -> CommunicationError:
        return self._watch.failure(self.sequence, self.signature, problem)

    def took_too_long(self) -> CommunicationError:
        limit = f"{self._watch.timeout_s:g} s (AXONN_TIMEOUT_SECONDS)"
        return self.failed(f"not done after {limit}")


class Lane(ABC):
    """A FIFO of collectives over the ranks of one axis.

    wait_at_once: each collective is waited for as soon as it is started; nothing else changes.
    """

    def __init__(
        self, axis: AxisGroup, lanes: _C.Lanes, watch: Watch, transport: Transport
    ) -> None:
        self.axis = axis
        self.wait_at_once = False
        self._lanes, self._watch = lanes, watch
        self._transport = transport
        self._lane = lanes.add_lane(axis.axis)

    @property
    def totals(self) -> _C.LaneTotals:
        return self._lanes.totals(self._lane)

    @property
    def progress(self) -> tuple[str, int, str]:
        return self._watch.progress

    def take_records(self) -> list[_C.LaneTask]:
        return self._lanes.take_records(self._lane)

    def all_gather(self, output: Tensor, shard: Tensor, what: str) -> Collective:
        """Starts an all-gather of the shards into `output`, in rank order. Both are contiguous."""

        def start() -> Started:
            return self._transport.all_gather(output, shard)

        return self._issue("all_gather", what, (shard, output), output.nbytes, start)

    def all_to_all(self, output: Tensor, input: Tensor, what: str) -> Collective:
        """Starts an all-to-all: `input` has a block for each rank, `output` gets one from each."""

        def start() -> Started:
            return self._transport.all_to_all(output, input)

        return self._issue("reduce_scatter", what, (input, output), input.nbytes, start)

    def all_reduce(self, tensor: Tensor, what: str) -> Collective:
        """Starts an all-reduce in place."""

        def start() -> Started:
            return self._transport.all_reduce(tensor)

        return self._issue("all_reduce", what, (tensor,), tensor.nbytes, start)

    @property
    @abstractmethod
    def capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""

    @abstractmethod
    def start_check(self) -> None:
        """Starts a check, at the end of a step, that all ranks issued the same collectives so far.

        It settles the previous check. Collectives: an all-gather of 8 bytes per rank.
        """

    @abstractmethod
    def settle(self) -> None:
        """Waits, on the host, for the last check and thus for all collectives before it.

        Raises: CommunicationError if the ranks issued different collectives.
        """

    @abstractmethod
    def _start(
        self, signature: str, sequence: int, tensors: tuple[Tensor, ...],
        start: Callable[[], Started], *, sent_bytes: int,
    ) -> Collective:  # fmt: skip
        """Calls `start`, which issues a collective that reads and writes the tensors.

        sent_bytes: the bytes that this rank sends, as trace_communication counts them.
        """

    def _issue(
        self, kind: str, what: str, tensors: tuple[Tensor, ...], num_bytes: int,
        start: Callable[[], Started],
    ) -> Collective:  # fmt: skip
        passed_in = tensors[0]
        dtype = str(passed_in.dtype).removeprefix("torch.")
        signature = f"{kind} of {what} ({passed_in.numel()} {dtype} per rank)"
        self._watch.issue(signature, compare=not self.capturing)
        sequence = self._lanes.submit(self._lane, f"{kind} {what}", num_bytes)
        passes = 2 if kind == "all_reduce" else 1
        sent_bytes = passes * num_bytes * (self.axis.size - 1) // self.axis.size
        try:
            collective = self._start(signature, sequence, tensors, start, sent_bytes=sent_bytes)
        except RuntimeError as error:
            raise self._watch.failure(sequence, signature, first_line(error)) from error
        if self.wait_at_once:
            collective.wait()
        return collective


def orders_differ(check: Collective) -> CommunicationError:
    return check.failed("ranks have issued different collectives since the last such check")


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
