"""Updates parameters bucket by bucket: all or a rank's parts (ZeRO), on the device or the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from axonn_ext.optim.crossing import Crossing, Values
from axonn_ext.optim.pieces import Kind, Options, Piece, update, update_on_host
from axonn_ext.optim.places import Place
from axonn_ext.optim.zero import Bucket, GradientShards, Run, buckets_of
from axonn_ext.optim.zero.shards import SummedBucket

RETURNING = 2  # buckets at a time: while one is sent to the other ranks, the next one is updated


@dataclass(frozen=True)
class UpdatedBucket:
    """A bucket that this rank updates, partly or completely.

    summed: the sum of its gradients over data; None: they are in `grad`
    """

    bucket: Bucket
    runs: tuple[Run, ...]
    pieces: tuple[Piece, ...]
    summed: SummedBucket | None

    def gradients(self) -> Values:
        """Returns the gradient of each run, if it has one."""
        if self.summed is None:
            return [None if r.parameter.grad is None else r.of(r.parameter.grad) for r in self.runs]
        given, flat = self.summed.given, self.summed.gradient
        return [
            r.inside(flat) if flat is not None and id(r.parameter) in given else None
            for r in self.runs
        ]

    @property
    def has_gradients(self) -> bool:
        """Whether this rank or another rank of data has a gradient."""
        if self.summed is not None:
            return self.summed.gradient is not None
        return any(run.parameter.grad is not None for run in self.runs)


class BucketedUpdate:
    """AdamW for contiguous parameters of one dtype on one device.

    shards: holds the sums of gradients, if ZeRO keeps them in parts. crossing: None updates on the
    device; else it is called with the gradients' dtype and the elements of the largest part.

    Collectives of a step: with shards, an all-gather over data of each bucket that has gradients.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        place: Place,
        bucket_elements: int,
        shards: GradientShards | None,
        crossing: Callable[[torch.dtype, int], Crossing] | None,
    ) -> None:
        self._shards = shards
        self.buckets = list(_buckets(parameters, bucket_elements, shards, place))
        self._crossing: Crossing | None = None
        if crossing is not None:
            numel = max((b.bucket.part_numel for b in self.buckets), default=0)
            self._crossing = crossing(parameters[0].dtype, numel)
        # Without transfers there is nothing to overlap with the update, and a second thread would
        # start a second team of OpenMP threads, for which there are no cores.
        self._slots = 1 if self._crossing is None else self._crossing.slots
        self._worker: ThreadPoolExecutor | None = None
        if self._slots > 1:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="axonn optimizer")

    @property
    def pieces(self) -> list[Piece]:
        """All pieces of this rank."""
        return [piece for bucket in self.buckets for piece in bucket.pieces]

    def step(self, options: Mapping[Kind, Options], factor: float) -> None:
        """Updates pieces with gradients, multiplied by the factor, and sends them to all ranks."""
        self._run([b for b in self.buckets if b.has_gradients], options, factor)

    def write_back(self) -> None:
        """Sets the parameters of all ranks to the masters."""
        self._run(self.buckets, {}, 1.0)

    def close(self) -> None:
        """Ends the thread that updates on the host."""
        if self._worker is not None:
            self._worker.shutdown()

    def _run(
        self, buckets: Sequence[UpdatedBucket], options: Mapping[Kind, Options], factor: float
    ) -> None:
        """Updates the buckets. Even after a failure, no update is in progress any more."""
        try:
            self._run_all(buckets, options, factor)
        except BaseException:
            if self._worker is not None:  # a single thread, which runs its tasks in order
                self._worker.submit(lambda: None).result()
            raise
        finally:
            if self._crossing is not None:
                self._crossing.arrived()

    def _run_all(
        self, buckets: Sequence[UpdatedBucket], options: Mapping[Kind, Options], factor: float
    ) -> None:
        """Overlaps three buckets at a time: one is copied, one is updated and one returns."""
        updated: deque[Callable[[], Callable[[], None]]] = deque()
        returned: deque[Callable[[], None]] = deque()
        for number, bucket in enumerate(buckets):
            updated.append(self._begin(bucket, number % self._slots, options, factor))
            if len(updated) == self._slots:
                returned.append(updated.popleft()())
            if len(returned) == RETURNING:
                returned.popleft()()
        while updated:
            returned.append(updated.popleft()())
        while returned:
            returned.popleft()()

    def _begin(
        self, bucket: UpdatedBucket, slot: int, options: Mapping[Kind, Options], factor: float
    ) -> Callable[[], Callable[[], None]]:
        """Starts a bucket's update.

        The result waits for it and starts to return the values; its own result waits for these.
        """
        part, places = self._places(bucket)
        if self._crossing is None:
            self._update_on_device(bucket, options, factor)
            for place, piece in zip(places, bucket.pieces, strict=True):
                place.copy_(piece.master)
            return lambda: self._give(bucket, part)
        crossing = self._crossing
        targets = crossing.targets(slot, places)
        gradients = crossing.to_host(slot, bucket.gradients())
        work = partial(self._update_on_host, bucket, gradients, targets, options, factor)
        done = work if self._worker is None else self._worker.submit(work).result

        def deliver() -> Callable[[], None]:
            done()
            crossing.to_device(slot, places)
            if part is not None:
                crossing.arrived()  # before other ranks get them
            return self._give(bucket, part)

        return deliver

    def _places(self, bucket: UpdatedBucket) -> tuple[Tensor | None, list[Tensor]]:
        """Returns the destinations on the device of the updated values of the runs.

        With ZeRO, they lie in memory for this rank's part, which is also returned.
        """
        if self._shards is None:
            return None, [run.of(run.parameter) for run in bucket.runs]
        like = bucket.bucket.runs[0].parameter
        part = like.new_zeros(bucket.bucket.part_numel, requires_grad=False)
        return part, [run.inside(part) for run in bucket.runs]

    def _give(self, bucket: UpdatedBucket, part: Tensor | None) -> Callable[[], None]:
        """Starts to send a part to the other ranks; the result copies all into parameters."""
        if part is None or self._shards is None:
            return lambda: None
        assert bucket.summed is not None
        pending = self._shards.exchange.all_gather(part, f"{bucket.summed.name} and more")

        def put() -> None:
            flat = pending()
            torch._foreach_copy_(
                [run.of(run.parameter) for run in bucket.bucket.runs],
                [run.inside(flat) for run in bucket.bucket.runs],
            )

        return put

    def _update_on_device(
        self, bucket: UpdatedBucket, options: Mapping[Kind, Options], factor: float
    ) -> None:
        if not options:
            return
        there = [(p, g) for p, g in zip(bucket.pieces, bucket.gradients(), strict=True)
                 if g is not None]  # fmt: skip
        gradients = [gradient.to(piece.master.dtype) for piece, gradient in there]
        if factor != 1:
            gradients = list(torch._foreach_mul(gradients, factor)) if gradients else []
        update([piece for piece, _ in there], gradients, options)

    @torch.no_grad()
    def _update_on_host(
        self, bucket: UpdatedBucket, gradients: Callable[[], Values], targets: Sequence[Tensor],
        options: Mapping[Kind, Options], factor: float,
    ) -> None:  # fmt: skip
        """Updates pieces with a gradient. The targets get the masters of all pieces."""
        updated: list[tuple[Piece, Tensor, Tensor]] = []
        for piece, gradient, target in zip(bucket.pieces, gradients(), targets, strict=True):
            if options and gradient is not None:
                updated.append((piece, gradient.contiguous(), target))
            else:
                target.copy_(piece.master)
        update_on_host(updated, options, factor)


def _buckets(
    parameters: Sequence[nn.Parameter], elements: int, shards: GradientShards | None, place: Place
) -> Iterator[UpdatedBucket]:
    if shards is None:
        for bucket in buckets_of(parameters, elements=elements):
            yield _with_state(bucket, bucket.runs, None, place)
        return
    kept = {id(p) for p in parameters}
    for summed in shards.buckets:
        if id(summed.bucket.runs[0].parameter) in kept:
            yield _with_state(summed.bucket, summed.runs, summed, place)


@torch.no_grad()
def _with_state(
    bucket: Bucket, runs: tuple[Run, ...], summed: SummedBucket | None, place: Place
) -> UpdatedBucket:
    dtype = bucket.runs[0].parameter.dtype
    wide = torch.promote_types(dtype, torch.float32)
    masters, averages, squares = (place.zeros(bucket.part_numel, wide) for _ in range(3))
    pieces = []
    for run in runs:
        piece = Piece(
            run.parameter, run.start, run.stop, run.inside(masters), run.inside(averages),
            run.inside(squares), torch.zeros((), device=masters.device),
        )  # fmt: skip
        piece.master.copy_(run.of(run.parameter))
        pieces.append(piece)
    return UpdatedBucket(bucket, runs, tuple(pieces), summed)
