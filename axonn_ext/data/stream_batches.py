"""Batches of a stream, which rank 0 reads ahead in a thread and sends to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from queue import Queue
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext.data.batches import Batch, BatchShares, RowGroup
from axonn_ext.data.stream import Place
from axonn_ext.ranks.rank_values import device_type, of_first_rank

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from axonn_ext.data.stream import Documents
    from axonn_ext.data.vocabulary import TokenArray


@dataclass(frozen=True)
class Stream:
    """A stream of a run: on rank 0 its documents and all tokens held out, elsewhere nothing."""

    documents: Documents | None = None
    held_out: TokenArray | None = None

    def held_out_everywhere(self) -> NDArray[Any]:
        """Returns the tokens held out, on all ranks. Collectives: those of `_from_rank_0`."""
        return _from_rank_0(lambda: torch.from_numpy(self.held_out)).numpy()


class StreamBatches:
    """The sequences of a stream, batch by batch, from any place in it.

    Steps must be asked for in turn, by all ranks alike: the first micro-batch of a step receives
    all its sequences. The place in the stream is known on rank 0.

    documents: on rank 0 only.

    Collectives: those of `_from_rank_0`, once per step, in `micro_batch`.

    Raises: ValueError if micro-batches and row groups do not divide the batch.
    """

    def __init__(
        self,
        documents: Documents | None,
        *,
        sequence_length: int,
        batch_size: int,
        num_micro_batches: int = 1,
        group: RowGroup | None = None,
    ) -> None:
        self._documents, self._length, self._size = documents, sequence_length, batch_size
        self._shares = BatchShares(batch_size, num_micro_batches, group or RowGroup())
        self._step, self._rows, self._place = -1, torch.empty(0), Place()
        self._ahead: _Ahead | None = None
        self.num_micro_batches = num_micro_batches
        self.tokens_per_step = batch_size * sequence_length
        self.shift = 0

    def num_labels(self, step: int) -> float:
        """Returns the number of labels of a step: one per token."""
        return float(self.tokens_per_step)

    def micro_batch(self, step: int, index: int) -> Batch:
        """Returns the row group's part of a micro-batch.

        Raises: ValueError, on all ranks, if rank 0 cannot read the stream.
        """
        if step != self._step:
            self._rows, self._step = _from_rank_0(self._next).long(), step
        first = self._shares.first(0, index)
        rows = self._rows[first : first + self._shares.count]
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    def state_dict(self) -> dict[str, Any]:
        """Returns the place after the last step that was read; on ranks other than 0, nothing."""
        if self._documents is None:
            return {}
        return {"of": self._documents.identity, "place": asdict(self._place)}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Goes on from a place. Returns False, and begins anew, if it is one in another stream."""
        if self._documents is None:
            return True
        if state.get("of") != self._documents.identity:
            return False
        self._place = Place(**state["place"])
        return True

    def _next(self) -> Tensor:
        """Returns a step's sequences, on rank 0."""
        assert self._documents is not None
        if self._ahead is None:
            steps = self._documents.sequences(self._place, count=self._size, length=self._length)
            self._ahead = _Ahead(steps)
        rows, self._place = next(self._ahead)
        return torch.from_numpy(rows)


class _Ahead:
    """The items of an endless iterator, each computed in a thread while the one before is used.

    The thread does not hold up the end of the process: a hub may never answer.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        self._ready: Queue[tuple[Any, Exception | None]] = Queue(1)
        Thread(target=self._read, args=(items,), daemon=True).start()

    def _read(self, items: Iterator[Any]) -> None:
        try:
            for item in items:
                self._ready.put((item, None))
        except Exception as error:  # belongs to whoever takes the item
            self._ready.put((None, error))

    def __next__(self) -> Any:
        item, error = self._ready.get()
        if error is not None:
            self._ready.put((None, error))  # for a further call
            raise error
        return item


def _from_rank_0(make: Callable[[], Tensor]) -> Tensor:
    """Returns, on all ranks, the int32 tensor that rank 0 makes.

    Collectives, with several ranks: three broadcasts, of a few bytes, the shape and the tensor.

    Raises: ValueError on all ranks if rank 0 does.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    error, made = None, torch.empty(0, dtype=torch.int32)
    if dist.get_rank() == 0:
        try:
            made = make()
        except ValueError as raised:
            error = str(raised)
    shape, error = of_first_rank([list(made.shape), error])
    if error is not None:
        raise ValueError(error)
    assert dist.group.WORLD is not None
    if dist.get_rank():
        made = made.new_empty(shape)
    made = made.to(device_type(dist.group.WORLD))
    dist.broadcast(made, src=0)
    return made.cpu()
